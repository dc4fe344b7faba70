"""Parts of porting that only TensorFlow and Keras need."""

"""Parts of precision that only TensorFlow and Keras need."""

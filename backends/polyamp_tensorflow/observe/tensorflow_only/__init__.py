"""Parts of the observer that only TensorFlow and Keras need."""

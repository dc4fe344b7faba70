"""Parts of the training step that only TensorFlow and Keras need."""

"""What Keras itself does not offer on all of its backends: one module per backend, alike (`polyamp_keras.engine`)."""

"""What a Keras model is made of."""

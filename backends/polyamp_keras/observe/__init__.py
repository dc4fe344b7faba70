"""What a comparison sees of a training of a Keras model, on every Keras backend."""

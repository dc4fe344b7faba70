"""A Keras model under training, and its step (S6 to S15) as one graph, on one replica or several."""

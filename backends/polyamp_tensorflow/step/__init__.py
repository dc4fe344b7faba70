"""Training state of a Keras model, and its step (S6 to S15) as one graph, on one replica or several."""

"""A policy on the layers of a Keras model: which dtype each gets, and how."""

"""Layers, variables and saved settings of a Keras model."""

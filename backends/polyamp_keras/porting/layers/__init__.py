"""Readers of Keras layers. Each returns the layout of a layer's arrays and its attributes."""

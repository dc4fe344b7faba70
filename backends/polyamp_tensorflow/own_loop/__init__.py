"""Loss scaling for Keras's `fit` and for custom training loops."""

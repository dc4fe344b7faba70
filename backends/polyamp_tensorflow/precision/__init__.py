"""Dtypes in which the layers of a Keras model run (S1 to S5)."""

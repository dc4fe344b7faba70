"""Observers of the JAX libraries: equinox, flax linen, flax nnx, haiku and plain functions."""

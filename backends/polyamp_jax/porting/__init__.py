"""JAX's half of moving models: flax's, equinox's and haiku's layers, and plain functions' parameters, in the canonical
layout."""

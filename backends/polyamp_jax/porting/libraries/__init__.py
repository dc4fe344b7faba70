"""JAX libraries whose models can be moved: equinox, flax linen, flax nnx, haiku and plain functions."""

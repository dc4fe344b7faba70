"""Transfer of JAX models to and from other frameworks: flax, equinox, haiku and plain functions. `converter` is the
entry module."""

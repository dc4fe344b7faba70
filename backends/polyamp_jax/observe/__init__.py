"""Recording of JAX training passes for `polyamp.compare`: the `Observer` protocol for JAX."""

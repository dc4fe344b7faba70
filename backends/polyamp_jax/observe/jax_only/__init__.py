"""JAX-specific parts of `observe`: output tags, named gradients and inference mode."""

"""JAX-specific parts of `observe`: output tags and named gradients."""

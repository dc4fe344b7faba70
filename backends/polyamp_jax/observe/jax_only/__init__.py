"""JAX-specific parts of `observe`: output tags and the observers of libraries."""

"""JAX training state as a pytree, and its step (S6 to S15) as one traced function."""

"""Parts of the training step that only JAX needs: native optax transformations."""

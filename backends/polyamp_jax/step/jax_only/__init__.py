"""Parts of the training step that only JAX needs: shardings, and native optax transformations."""

"""Parts of the training step that only JAX needs: shardings, optax specifics, micro-batch scans, coordination."""

"""What only JAX needs of a loop: `select`, the conditional update of a tree."""

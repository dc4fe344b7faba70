"""Parts of porting that only JAX needs."""

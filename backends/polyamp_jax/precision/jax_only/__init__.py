"""Parts of the precision code that only JAX needs: the policy engine and autocast regions."""

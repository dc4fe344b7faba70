"""Parts of this room that only JAX needs: shardings on a device mesh, its coordination service, and its errors."""

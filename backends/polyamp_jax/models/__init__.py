"""Models of each JAX library, split into parts, called under casts and rebuilt. `libraries` selects the library."""

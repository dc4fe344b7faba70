"""Models of each JAX library, split into parts, called under casts and rebuilt. `library` selects the library."""

"""Transfer of torch models to and from other frameworks. `converter` is the entry module."""

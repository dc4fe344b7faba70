"""Transfer of Keras models to and from other frameworks. `converter` is the entry module."""

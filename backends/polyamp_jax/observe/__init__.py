"""Watching a training of JAX models for `polyamp.compare`: `Observer` over JAX. Loaded by `JaxBackend.observer`."""

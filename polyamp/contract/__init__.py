"""Backend protocols, and the registry that resolves a backend from an object or a name."""

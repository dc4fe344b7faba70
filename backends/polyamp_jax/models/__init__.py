"""Adapters that split, call and rebuild the models of each JAX library."""

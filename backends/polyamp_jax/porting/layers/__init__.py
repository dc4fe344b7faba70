"""Canonical names and attributes of JAX activation functions."""

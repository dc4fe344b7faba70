"""Evaluates a jaxpr with each operation in the dtype that the op list gives it (S3, S4, S5)."""

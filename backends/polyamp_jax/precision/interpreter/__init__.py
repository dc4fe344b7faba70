"""Interpreter that evaluates a jaxpr with each operation in its op-list dtype (S3, S4, S5)."""

"""Precision of operations and modules: S1 to S5."""

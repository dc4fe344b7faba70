"""Comparing two traces: alignment, tolerances, and the diagnosis of the first divergence."""

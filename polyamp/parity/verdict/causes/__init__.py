"""Causes of a divergence, one function each: rules of the training step, and formulas of modules."""

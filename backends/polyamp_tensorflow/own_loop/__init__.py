"""Loss scaling for `fit` and for loops that people keep in their own hands."""

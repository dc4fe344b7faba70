"""`fit` and loops of one's own: `LossScaleOptimizer`, `compile` and `guard`."""

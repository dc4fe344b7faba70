"""Precision of torch code (S1 to S5): autocast with its float32 islands, and modules under a policy."""

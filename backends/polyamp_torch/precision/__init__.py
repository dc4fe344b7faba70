"""In which dtype torch code runs (S1 to S5): autocast with its float32 islands, and modules under a policy."""

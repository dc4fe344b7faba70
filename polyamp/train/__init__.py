"""User-facing functions that find the backend: `init`, the training step and its halves, and checkpoints."""

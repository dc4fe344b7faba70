"""`init`, the step and its halves, and checkpoints: what a user calls. They find the backend."""

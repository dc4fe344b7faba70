"""Loss scaling for training loops that people keep in their own hands."""

"""Training state of a torch model, and its training step (S6 to S15), eager or compiled."""

"""Faults of precision in a training set-up that does not use polyamp."""

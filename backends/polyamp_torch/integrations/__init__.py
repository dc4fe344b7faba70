"""Adapters for the training loops of Lightning and Accelerate."""

"""Traces of a training: what a participant records of each step."""

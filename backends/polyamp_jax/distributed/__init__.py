"""Replicas of a step in JAX: reductions over them, their processes, and shardings on a device mesh."""

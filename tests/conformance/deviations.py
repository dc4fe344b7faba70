"""What a backend does not do yet: (backend, rule, reason), strict. A row whose test starts passing fails the run."""

from __future__ import annotations

DEVIATIONS: list[tuple[str, str, str]] = [
    ("jax", "s09_replicas", "the JAX backend does not run replicas yet"),
    ("torch", "s09_replicas", "the torch backend does not run replicas yet"),
]

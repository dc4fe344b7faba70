"""What a backend does not do yet: (backend, rule, reason), strict. A row whose test starts passing fails the run."""

from __future__ import annotations

DEVIATIONS: list[tuple[str, str, str]] = [
    ("tensorflow", "s04_inner_products", "the op list has no products without free axes"),
    ("tensorflow", "s04_the_gradient_of_a_gather", "TensorFlow adds up the gradient's slices in their own dtype"),
    ("jax", "s09_replicas", "the JAX backend does not run replicas yet"),
    ("torch", "s09_replicas", "the torch backend does not run replicas yet"),
]

"""What this backend does not do yet, as (backend, rule, reason): `--polyamp-deviations` of the conformance suite.

Strict: a row whose test starts passing fails the run.
"""

DEVIATIONS = [
    ("mlx", "s09_replicas_take_the_same_decision", "one device: gradients are not summed with mx.distributed"),
    ("mlx", "s01_float64", "MLX computes float64 on the CPU alone, and this backend has no such block"),
]

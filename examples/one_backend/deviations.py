"""Known deviations of this backend as (backend, rule, reason), for `--polyamp-deviations` of the conformance suite.

Strict: a row whose test starts passing fails the run.
"""

DEVIATIONS = [
    ("mlx", "s09_replicas_take_the_same_decision", "one device: gradients are not summed with mx.distributed"),
    ("mlx", "s03_the_policy_that_loss_fn_puts_around_something_decides_for_it[cast", "refused in mode='cast'"),
    ("mlx", "s12_what_the_forward_pass_writes", "a write to a parameter is refused"),
    ("mlx", "s12_a_skipped_step_takes_back", "a write to a parameter is refused"),
    ("mlx", "s34", "it keeps no averages of parameters"),
    ("mlx", "s01_float64", "MLX computes float64 on the CPU alone, and this backend has no such block"),
]

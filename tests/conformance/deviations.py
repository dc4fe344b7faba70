"""What a backend does not do yet: (backend, rule, reason), strict. A row whose test starts passing fails the run."""

from __future__ import annotations

DEVIATIONS: list[tuple[str, str, str]] = [
    ("reference", "s04_sensitive_families_run_in_float32[linear algebra", "NumPy's tensor has no linear algebra"),
    ("reference", "s04_sensitive_families_run_in_float32[FFT", "NumPy's tensor has no FFT"),
    ("keras-jax", "s35_outputs_of_modules_are_measured", "outputs of Keras's layers on JAX are not measured"),
    ("keras-jax", "s35_activations_that_match_no_module", "outputs of Keras's layers on JAX are not measured"),
    ("keras-jax", "s36_a_monitor_measures", "products of Keras's layers on JAX are not measured"),
    ("keras-jax", "s31_the_same_program_agrees", "Keras models on JAX are not compared"),
    ("keras-jax", "s31_the_first_difference_is_named[loss]", "Keras models on JAX are not compared"),
    ("keras-jax", "s31_the_first_difference_is_named[decay]", "Keras models on JAX are not compared"),
    ("keras-jax", "s31_the_first_difference_is_named[beta]", "Keras models on JAX are not compared"),
    (
        "keras-torch",
        "s12_what_the_forward_pass_writes_to_a_parameter",
        "on torch Keras assigns to the cast copy of a variable, while a layer in 16 bits is called",
    ),
    ("keras-torch", "s01_float64", "on torch Keras computes with 64-bit numbers in 32 bits"),
    ("keras-torch", "s09_replicas_take_the_same_decision", "Keras models on torch are trained in one process"),
]

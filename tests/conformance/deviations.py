"""What a backend does not do yet: (backend, rule, reason), strict. A row whose test starts passing fails the run."""

from __future__ import annotations

DEVIATIONS: list[tuple[str, str, str]] = [
    ("reference", "s04_sensitive_families_run_in_float32[linear algebra", "NumPy's tensor has no linear algebra"),
    ("reference", "s04_sensitive_families_run_in_float32[FFT", "NumPy's tensor has no FFT"),
    ("keras-torch", "s01_float64", "on torch Keras computes with 64-bit numbers in 32 bits"),
    ("keras-torch", "s09_replicas_take_the_same_decision", "Keras models on torch are trained in one process"),
]

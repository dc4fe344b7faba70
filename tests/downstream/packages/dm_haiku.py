"""dm-haiku: its transformer example."""

from tests.downstream.package import Package

PACKAGE = Package(
    "dm-haiku",
    "0.0.17",
    "jax",
    "its transformer example",
    ("jax.grad and jax.value_and_grad",),
    program="haiku_transformer.py",
    needs_source=True,
)

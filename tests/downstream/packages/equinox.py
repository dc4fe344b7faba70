"""equinox: the example of its README, and its filtered transformations. Its tests are in no distribution."""

from tests.downstream.package import Package

PACKAGE = Package(
    "equinox",
    "0.13.8",
    "jax",
    "the example of its README, and an MLP by `filter_value_and_grad`",
    ("jax.grad and jax.value_and_grad",),
    program="equinox_readme.py",
    needs_source=True,
)

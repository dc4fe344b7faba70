"""flax: its toy examples of nnx, as scripts."""

from tests.downstream.package import Package

PACKAGE = Package(
    "flax",
    "0.12.8",
    "jax",
    "four of its nnx examples that train, as scripts",
    ("jax.grad and jax.value_and_grad",),
    program="flax_examples.py",
    needs_source=True,
    requires=("matplotlib",),
    environment={"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},  # what its FSDP example shards over
)

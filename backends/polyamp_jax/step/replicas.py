"""Where a step may not run: inside functions that are mapped over replicas (S9). Called by the halves of the step."""

from __future__ import annotations

from polyamp.errors import UnsupportedError
from polyamp_jax import compat


def check_axes(what: str) -> None:
    """Refuse to step inside `shard_map` or `pmap`: gradients would be summed, or replicas would part (S9).

    Raises:
        UnsupportedError: names the axes.
    """
    axes = compat.mapped_axes()
    if axes:
        named = ", ".join(map(repr, axes))
        raise UnsupportedError(
            f"{what} does not run inside shard_map or pmap: replicas would take different decisions, or gradients be "
            f"summed over them. Axes that are mapped here: {named}. Take the step out of the mapped function and give "
            "jax.jit a sharded batch (jax.device_put with a NamedSharding): JAX then divides the work by itself. "
            "loss_fn may use shard_map inside."
        )

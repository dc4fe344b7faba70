"""Weight of a micro-batch or replica in the mean of a loss (S8, S9)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from polyamp.rules.loss_weights import TermTotals, WeightFunction


class LossWeighting(NamedTuple):
    """Weighting of a batch (S8, S9).

    Attributes:
        function: the user's `weight=`, or None.
        share: for a micro-batch weighted by its rows: its rows divided by those of the largest micro-batch.
        rows: number of rows of the batch; None if it is the only batch.
        totals: divisors of the terms of a sum of means, or None.
    """

    function: WeightFunction | None = None
    share: float = 1.0
    rows: int | None = None
    totals: TermTotals | None = None


def to_weight(value: Any) -> jax.Array:
    """Convert a number or a scalar to float32, without a gradient."""
    return jax.lax.stop_gradient(jnp.asarray(value, jnp.float32))


def batch_rows(batch: Any) -> int:
    """Return the number of rows of a batch, or 1 if its arrays do not agree."""
    lengths = {shape[0] for _, shape in batch_shapes(batch) if shape}
    return lengths.pop() if len(lengths) == 1 else 1


def batch_shapes(batch: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Return (path, shape) of every array of a batch."""
    return [(jax.tree_util.keystr(path), jnp.shape(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(batch)]


def weight_divisor(weight: Any) -> Any:
    """Return the divisor of a weighted sum: the weight, or 1 if the weight is 0."""
    return jnp.where(weight > 0.0, weight, 1.0)


def multiply_by_weight(gradient: Any, weight: Any) -> Any:
    """Multiply a gradient by the weight of its micro-batch. A weight of 0 gives zeros, even for NaN or inf."""
    if weight is None:
        return gradient
    return jnp.where(weight > 0.0, gradient * weight.astype(gradient.dtype), 0.0)

"""Reductions over the axes of the enclosing `shard_map` or `pmap` (S9)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import jax

_LAX: Final[Any] = jax.lax  # JAX does not annotate its collectives


def all_reduce_sum(leaves: Sequence[Any], over: Sequence[frozenset[Any]]) -> list[Any]:
    """Return each leaf summed over its own axes, by one reduction for leaves of equal axes.

    Args:
        leaves: arrays; None stays None.
        over: for each leaf the axes to sum over; none leaves it as it is.
    """
    found = list(leaves)
    # in the order of the leaves: with a set's order, processes would build different programs
    for axes in dict.fromkeys(each for leaf, each in zip(leaves, over, strict=True) if leaf is not None and each):
        numbers = [n for n, each in enumerate(over) if each == axes and leaves[n] is not None]
        sums = _LAX.psum([leaves[n] for n in numbers], tuple(sorted(axes)))
        for number, total in zip(numbers, sums, strict=True):
            found[number] = total
    return found


def average_over_axes(value: Any, axes: Collection[Any]) -> Any:
    """Return the mean over `axes` of the enclosing `shard_map`, or the value itself if there are none."""
    return _LAX.pmean(value, tuple(sorted(axes))) if axes else value


def axis_size(axis: Any) -> int:
    """Return the number of replicas along an axis, a Python number."""
    size: int = _LAX.psum(1, axis)  # of a Python number, it is known while tracing
    return size

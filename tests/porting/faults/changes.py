"""What goes wrong with an array that is carried by hand. Called by the lists of faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def transposed(array: Array) -> Array:
    """A square kernel the other way round."""
    return array.T


def half(array: Array) -> Array:
    """Through float16."""
    return array.astype(np.float16).astype(array.dtype)


def rows_swapped(array: Array) -> Array:
    """The first two rows in each other's place."""
    return array[[1, 0, *range(2, len(array))]]


def gates(
    change: Callable[[Array], Array] | None, count: int, order: Sequence[int], axis: int = 0
) -> Callable[[Array], Array]:
    """A packed array with its parts in another order, or with some of them changed.

    Args:
        change: what is done to the parts of `order`; None puts the parts in that order.
        count: number of parts.
        order: numbers of parts.
        axis: along which they are packed.
    """

    def changed(array: Array) -> Array:
        parts = np.split(array, count, axis)
        if change is None:
            parts = [parts[number] for number in order]
        else:
            parts = [change(part) if number in order else part for number, part in enumerate(parts)]
        return np.concatenate(parts, axis)

    return changed


def every(change: Callable[[Array], Array]) -> Callable[..., Any]:
    """The same done to each array that was found."""

    def changed(*arrays: Array) -> Any:
        return tuple(change(array) for array in arrays)

    return changed

"""S8: the micro-batches that make one update, and their weights.

The result of an accumulated update is that of one batch of all rows, so a micro-batch counts by its share of the rows.
This module knows no framework.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from polyamp.errors import BatchError

Shape = tuple[int, ...]


class Accumulation(NamedTuple):
    """The micro-batches of one update.

    Attributes:
        sizes: rows of each; only their proportions count.

    Example:
        >>> window = Accumulation((2, 2, 2, 1))
        >>> window.weights, window.total
        ((1.0, 1.0, 1.0, 0.5), 3.5)
    """

    sizes: tuple[int, ...]

    @property
    def weights(self) -> tuple[float, ...]:
        """Factor of the scaled loss of each micro-batch: its rows over those of the largest one, 1 if all are equal.

        No weight is above 1, so weighting never causes an overflow.
        """
        most = max(self.sizes)
        return tuple(size / most for size in self.sizes)

    @property
    def total(self) -> float:
        """Divisor of the sums over all micro-batches: the sum of the weights, or their number if all are equal."""
        return sum(self.weights)

    @property
    def is_even(self) -> bool:
        """Whether all micro-batches have the same size."""
        return len(set(self.sizes)) == 1

    @property
    def runs(self) -> list[range]:
        """Index ranges of consecutive micro-batches of one size, for backends that loop over equal shapes.

        >>> Accumulation((2, 2, 2, 1)).runs
        [range(0, 3), range(3, 4)]
        """
        found, start = [], 0
        for _, members in groupby(self.sizes):
            stop = start + len(list(members))
            found.append(range(start, stop))
            start = stop
        return found


def divide_rows(length: int, count: int) -> Accumulation:
    """Divide `length` rows into `count` micro-batches. Sizes differ by at most one, the larger first; none is empty.

    >>> divide_rows(8, 4).sizes, divide_rows(7, 4).sizes, divide_rows(2, 4).sizes
    ((2, 2, 2, 2), (2, 2, 2, 1), (1, 1))
    """
    parts = min(length, count)
    size, larger = divmod(length, parts)
    return Accumulation((size + 1,) * larger + (size,) * (parts - larger))


def is_concatenated(shapes: list[Shape]) -> bool:
    """Return how the values of one leaf of `aux` are joined over the micro-batches (S8).

    False stacks them. True concatenates them along axis 0: the leaf has a row per example and the sizes differ.

    Args:
        shapes: shape of the leaf in each micro-batch.

    Raises:
        BatchError: neither is possible.

    >>> is_concatenated([(), ()]), is_concatenated([(2, 3), (1, 3)])
    (False, True)
    """
    if len(set(shapes)) == 1:
        return False
    if any(not shape for shape in shapes) or len({shape[1:] for shape in shapes}) > 1:
        raise BatchError(
            "aux must have one shape in every micro-batch, so that it can be stacked, or differ along axis 0 alone. "
            f"Received: {', '.join(map(str, dict.fromkeys(shapes)))}."
        )
    return True

"""S8: the window of micro-batches that makes one update, and what each of them weighs.

A window's result is that of one batch of all its rows, so a micro-batch counts by its share of them. Made by `batches`
while a batch is split; every backend reads it. It knows no framework.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from polyamp.errors import BatchError

Shape = tuple[int, ...]


class Window(NamedTuple):
    """The micro-batches of one update.

    Attributes:
        sizes: rows of each; only their proportions count.

    Example:
        >>> window = Window((2, 2, 2, 1))
        >>> window.shares, window.total
        ((1.0, 1.0, 1.0, 0.5), 3.5)
    """

    sizes: tuple[int, ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """What the scaled loss of each is multiplied by: its rows over those of the largest, which is 1 for equal ones.

        None is above 1, so that weighing makes nothing overflow.
        """
        most = max(self.sizes)
        return tuple(size / most for size in self.sizes)

    @property
    def total(self) -> float:
        """What the sums over the window are divided by: the sum of the shares; of equal micro-batches their number."""
        return sum(self.shares)

    @property
    def even(self) -> bool:
        """Whether all are equal."""
        return len(set(self.sizes)) == 1

    @property
    def runs(self) -> list[range]:
        """The numbers of neighbours of one size, for backends that loop over equal shapes.

        >>> Window((2, 2, 2, 1)).runs
        [range(0, 3), range(3, 4)]
        """
        found, start = [], 0
        for _, members in groupby(self.sizes):
            stop = start + len(list(members))
            found.append(range(start, stop))
            start = stop
        return found


def divided(length: int, count: int) -> Window:
    """`length` rows as `count` micro-batches that differ by one row at most, the larger first; never an empty one.

    >>> divided(8, 4).sizes, divided(7, 4).sizes, divided(2, 4).sizes
    ((2, 2, 2, 2), (2, 2, 2, 1), (1, 1))
    """
    parts = min(length, count)
    size, larger = divmod(length, parts)
    return Window((size + 1,) * larger + (size,) * (parts - larger))


def joins(shapes: list[Shape]) -> bool:
    """How the values of one leaf of `aux` over a window become one array: False to stack them, True to concatenate them
    along axis 0, as where a leaf has a row for each example and the micro-batches differ (S8).

    Args:
        shapes: of each micro-batch's.

    Raises:
        BatchError: neither can be done.

    >>> joins([(), ()]), joins([(2, 3), (1, 3)])
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

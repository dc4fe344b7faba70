"""`SharedRandomNumbers`: random numbers for the dropout of both sides where randomness is "shared"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyamp.porting.layouts.inventory import Inventory

if TYPE_CHECKING:
    import numpy as np

    from polyamp.parity.trace.observer import UniformSource

    Array = np.ndarray[Any, Any]


class SharedRandomNumbers:
    """Uniform numbers of [0, 1) that depend only on the sequence of calls and their shapes.

    They are the same in every pass, because a compiled program draws only when it is traced, and an eager one in each
    pass.

    Example:
        >>> numbers = SharedRandomNumbers()
        >>> one = numbers.next((2, 3))
        >>> numbers.restart()
        >>> bool((numbers.next((2, 3)) == one).all())
        True
    """

    def __init__(self) -> None:
        self._count = 0

    def restart(self) -> None:
        """Start again from the first number, for a new pass."""
        self._count = 0

    def next(self, shape: tuple[int, ...]) -> Array:
        """Return the next numbers, float32."""
        import numpy as np

        self._count += 1
        return np.random.default_rng([self._count, *shape]).random(shape, np.float32)

    def uniform_source(self, inventory: Inventory) -> UniformSource:
        """Return `next` as a source for a side with the channel order of its inventory."""
        rank = inventory.spatial + 2 if inventory.spatial and inventory.channels == "first" else 0

        def draws(shape: tuple[int, ...]) -> Array:
            import numpy as np

            if not rank or len(shape) != rank:
                return self.next(tuple(shape))
            return np.ascontiguousarray(np.moveaxis(self.next((shape[0], *shape[2:], shape[1])), -1, 1))

        return draws

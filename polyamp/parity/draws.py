"""`Numbers`: the random numbers that both sides' dropout is made of where randomness is "shared". Called by `party`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyamp.porting.layouts.inventory import Inventory

if TYPE_CHECKING:
    import numpy as np

    from polyamp.parity.observing import Draws

    Array = np.ndarray[Any, Any]


class Numbers:
    """Uniform numbers of [0, 1) in an order that hangs on nothing but the calls and their shapes.

    They are the same in every pass: a program that is compiled draws when it is traced, and one that is not draws in
    each pass.

    Example:
        >>> numbers = Numbers()
        >>> one = numbers.next((2, 3))
        >>> numbers.again()
        >>> bool((numbers.next((2, 3)) == one).all())
        True
    """

    def __init__(self) -> None:
        self._count = 0

    def again(self) -> None:
        """From the beginning: a new pass."""
        self._count = 0

    def next(self, shape: tuple[int, ...]) -> Array:
        """The numbers of the next call, float32."""
        import numpy as np

        self._count += 1
        return np.random.default_rng([self._count, *shape]).random(shape, np.float32)

    def laid(self, inventory: Inventory) -> Draws:
        """The same, for a side whose images have their channels where its inventory says."""
        rank = inventory.spatial + 2 if inventory.spatial and inventory.channels == "first" else 0

        def draws(shape: tuple[int, ...]) -> Array:
            import numpy as np

            if not rank or len(shape) != rank:
                return self.next(tuple(shape))
            return np.ascontiguousarray(np.moveaxis(self.next((shape[0], *shape[2:], shape[1])), -1, 1))

        return draws

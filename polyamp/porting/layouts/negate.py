"""`Negate`, an operation for a gate whose complement a framework stores; see `operations` for the others."""

from __future__ import annotations

import dataclasses

import numpy as np

from polyamp.errors import PortError
from polyamp.porting.layouts.lazy_array import Array
from polyamp.porting.layouts.operations import Operation, Shape


@dataclasses.dataclass(frozen=True)
class Negate(Operation):
    """Sign change of some equal blocks of each array. haiku's GRU has the complement of the update gate of all others,
    and 1 - sigmoid(x) is sigmoid(-x).

    >>> import numpy as np
    >>> Negate((1,), 2).forward([np.ones(4)])[0].tolist()
    [1.0, 1.0, -1.0, -1.0]
    """

    chosen: tuple[int, ...] = (0,)
    blocks: int = 1
    axis: int = -1

    def shapes(self, shapes: list[Shape]) -> list[Shape]:
        return shapes

    def forward(self, arrays: list[Array]) -> list[Array]:
        turned = [np.array(array) for array in arrays]
        for array in turned:
            parts = np.split(array, self.blocks, self.axis)  # views
            for number in self.chosen:
                np.negative(parts[number], out=parts[number])
        return turned

    def backward(self, arrays: list[Array]) -> list[Array]:
        return self.forward(arrays)

    def moments(self, arrays: list[Array]) -> list[Array]:
        """Raise, because the mean of gradients changes its sign and the mean of their squares does not."""
        raise PortError(
            "the optimizer's moments of a gate whose sign differs between the frameworks (haiku's GRU) cannot be "
            "moved. Port the weights, and start the optimizer anew."
        )

"""`AbsentBias`, an operation for a layer that has no bias where its counterpart has one; see `operations`."""

from __future__ import annotations

import dataclasses

import numpy as np

from polyamp.errors import PortError
from polyamp.porting.layouts.lazy_array import Array
from polyamp.porting.layouts.operations import Operation, Shape


@dataclasses.dataclass(frozen=True)
class AbsentBias(Operation):
    """Bias of zeros after a kernel. `backward` drops it, and accepts only exact zeros.

    Args:
        shape: the bias's shape.
        layer: path of the layer without a bias, for the error.

    >>> import numpy as np
    >>> [array.tolist() for array in AbsentBias((2,), "conv").forward([np.ones((1, 2))])]
    [[[1.0, 1.0]], [0.0, 0.0]]
    """

    shape: Shape
    layer: str

    @property
    def absent(self) -> tuple[int, ...]:
        """Number of the array that the layer lacks, so that it has no gradient there."""
        return (1,)

    def shapes(self, shapes: list[Shape]) -> list[Shape]:
        (kernel,) = shapes
        return [kernel, self.shape]

    def forward(self, arrays: list[Array]) -> list[Array]:
        return [arrays[0], np.zeros(self.shape, arrays[0].dtype)]

    def backward(self, arrays: list[Array]) -> list[Array]:
        if np.any(arrays[1]):
            raise PortError(
                f"{self.layer!r} of the target has no bias, and its counterpart in the source has one that is not zero "
                f"(its largest value is {float(np.max(np.abs(arrays[1]))):.2g}). Build the target's layer with a bias."
            )
        return [arrays[0]]

    def moments(self, arrays: list[Array]) -> list[Array]:
        """Return the kernel's moments. Those of a bias that does not move are not kept."""
        return [arrays[0]]

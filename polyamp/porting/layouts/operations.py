"""Reversible operations between a framework's native arrays of a layer and the canonical ones.

Each operation knows its inverse, so each framework needs only one table, its forms. `backward(forward(arrays))` is
`arrays`, bit for bit. In the other direction, `loses` reports what a framework cannot represent; only `Merge` and
similar operations have such losses. A third party writes an operation by implementing these six members.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from polyamp.errors import PortError
from polyamp.porting.layouts.lazy_array import Array

Shape = tuple[int, ...]


class Operation(Protocol):
    """One step from native arrays to canonical ones."""

    @abc.abstractmethod
    def shapes(self, shapes: list[Shape]) -> list[Shape]:
        """Return the shapes of the arrays that `forward` returns for these shapes."""

    @abc.abstractmethod
    def forward(self, arrays: list[Array]) -> list[Array]:
        """Convert native arrays to canonical arrays."""

    @abc.abstractmethod
    def backward(self, arrays: list[Array]) -> list[Array]:
        """Convert canonical arrays to native arrays; the inverse of `forward`."""

    def gradients(self, arrays: list[Array]) -> list[Array]:
        """Convert native gradients to canonical gradients; by default as `forward`, for an operation that only moves
        values."""
        return self.forward(arrays)

    def moments(self, arrays: list[Array]) -> list[Array]:
        """Convert an optimizer's canonical moments, which have the layout of gradients, to native: the inverse of
        `gradients`."""
        return self.backward(arrays)

    def loses(self, arrays: list[Array]) -> str:
        """Return what `backward` loses of these canonical arrays, as a phrase; "" if nothing."""
        return ""


class Moves(Operation):
    """Operation that only moves values, so that gradients move in the same way, and nothing is lost."""


@dataclasses.dataclass(frozen=True)
class Transpose(Moves):
    """Permutation of the axes of each array: canonical axis i is native axis `axes[i]`.

    >>> import numpy as np
    >>> Transpose((1, 0)).forward([np.zeros((2, 3))])[0].shape
    (3, 2)
    """

    axes: tuple[int, ...]

    def shapes(self, shapes: list[Shape]) -> list[Shape]:
        return [tuple([shape[axis] for axis in self.axes]) for shape in shapes]

    def forward(self, arrays: list[Array]) -> list[Array]:
        return [array.transpose(self.axes) for array in arrays]

    def backward(self, arrays: list[Array]) -> list[Array]:
        back = sorted(range(len(self.axes)), key=self.axes.__getitem__)
        return [array.transpose(back) for array in arrays]


@dataclasses.dataclass(frozen=True)
class Reshape(Moves):
    """Reshape of each array to another shape with the same elements.

    >>> import numpy as np
    >>> Reshape((6,), (2, 3)).forward([np.zeros(6)])[0].shape
    (2, 3)
    """

    native: Shape
    canonical: Shape

    def shapes(self, shapes: list[Shape]) -> list[Shape]:
        for shape in shapes:
            if shape != self.native or math.prod(self.native) != math.prod(self.canonical):
                raise ValueError(f"an array of {list(shape)} is not one of {list(self.native)}")
        return [self.canonical] * len(shapes)

    def forward(self, arrays: list[Array]) -> list[Array]:
        return [array.reshape(self.canonical) for array in arrays]

    def backward(self, arrays: list[Array]) -> list[Array]:
        return [array.reshape(self.native) for array in arrays]


@dataclasses.dataclass(frozen=True)
class Flip(Moves):
    """Reversal of each array along some axes, for kernels of transposed convolutions.

    >>> import numpy as np
    >>> Flip((0,)).forward([np.arange(3)])[0].tolist()
    [2, 1, 0]
    """

    axes: tuple[int, ...]

    def shapes(self, shapes: list[Shape]) -> list[Shape]:
        return shapes

    def forward(self, arrays: list[Array]) -> list[Array]:
        return [np.flip(array, self.axes) for array in arrays]

    def backward(self, arrays: list[Array]) -> list[Array]:
        return self.forward(arrays)


@dataclasses.dataclass(frozen=True)
class Blocks(Moves):
    """Permutation of equal blocks along an axis of each array: canonical block i is native block `order[i]`.

    Used for the gates of recurrent layers, for example.

    >>> import numpy as np
    >>> Blocks((1, 0)).forward([np.arange(4)])[0].tolist()
    [2, 3, 0, 1]
    """

    order: tuple[int, ...]
    axis: int = -1

    def shapes(self, shapes: list[Shape]) -> list[Shape]:
        for shape in shapes:
            if shape[self.axis] % len(self.order):
                raise ValueError(f"axis {self.axis} of {list(shape)} has no {len(self.order)} equal blocks")
        return shapes

    def forward(self, arrays: list[Array]) -> list[Array]:
        return [_permute_blocks(array, self.order, self.axis) for array in arrays]

    def backward(self, arrays: list[Array]) -> list[Array]:
        back = tuple(sorted(range(len(self.order)), key=self.order.__getitem__))
        return [_permute_blocks(array, back, self.axis) for array in arrays]


def _permute_blocks(array: Array, order: Sequence[int], axis: int) -> Array:
    parts = np.split(array, len(order), axis)
    return np.concatenate([parts[number] for number in order], axis)


@dataclasses.dataclass(frozen=True)
class Split(Moves):
    """Split of one native array into several canonical ones, of these lengths along an axis.

    >>> import numpy as np
    >>> [part.shape for part in Split((4, 2, 2)).forward([np.zeros((3, 8))])]
    [(3, 4), (3, 2), (3, 2)]
    """

    lengths: tuple[int, ...]
    axis: int = -1

    def shapes(self, shapes: list[Shape]) -> list[Shape]:
        (shape,) = shapes
        axis = self.axis % len(shape)
        if shape[axis] != sum(self.lengths):
            raise ValueError(f"axis {axis} of {list(shape)} is not {' + '.join(map(str, self.lengths))} long")
        return [(*shape[:axis], length, *shape[axis + 1 :]) for length in self.lengths]

    def forward(self, arrays: list[Array]) -> list[Array]:
        edges = [sum(self.lengths[: number + 1]) for number in range(len(self.lengths) - 1)]
        return np.split(arrays[0], edges, self.axis)

    def backward(self, arrays: list[Array]) -> list[Array]:
        return [np.concatenate(arrays, self.axis)]


@dataclasses.dataclass(frozen=True)
class Join(Moves):
    """Concatenation of several native arrays, of these lengths along an axis, to one canonical array: the inverse of
    `Split`.

    >>> import numpy as np
    >>> Join((1, 1)).forward([np.zeros((3, 1)), np.ones((3, 1))])[0].shape
    (3, 2)
    """

    lengths: tuple[int, ...]
    axis: int = -1

    def shapes(self, shapes: list[Shape]) -> list[Shape]:
        first = shapes[0]
        axis = self.axis % len(first)
        if [shape[axis] for shape in shapes] != list(self.lengths):
            raise ValueError(f"arrays of {[list(shape) for shape in shapes]} are not {self.lengths} along axis {axis}")
        return [(*first[:axis], sum(self.lengths), *first[axis + 1 :])]

    def forward(self, arrays: list[Array]) -> list[Array]:
        return Split(self.lengths, self.axis).backward(arrays)

    def backward(self, arrays: list[Array]) -> list[Array]:
        return Split(self.lengths, self.axis).forward(arrays)


@dataclasses.dataclass(frozen=True)
class First(Moves):
    """Operation on the first arrays only; the arrays after them stay unchanged.

    Args:
        count: number of native arrays that the operation takes.
        operation: one that only moves values.
        made: number of arrays that the operation returns.

    >>> import numpy as np
    >>> [part.shape for part in First(2, Join((1, 1))).forward([np.zeros(1), np.ones(1), np.zeros(5)])]
    [(2,), (5,)]
    """

    count: int
    operation: Moves
    made: int = 1

    def shapes(self, shapes: list[Shape]) -> list[Shape]:
        return [*self.operation.shapes(shapes[: self.count]), *shapes[self.count :]]

    def forward(self, arrays: list[Array]) -> list[Array]:
        return [*self.operation.forward(arrays[: self.count]), *arrays[self.count :]]

    def backward(self, arrays: list[Array]) -> list[Array]:
        return [*self.operation.backward(arrays[: self.made]), *arrays[self.made :]]


@dataclasses.dataclass(frozen=True)
class Apart(Moves):
    """A separate operation for each array, by position. Each takes one array and returns one.

    >>> import numpy as np
    >>> Apart((Flip((0,)), Transpose((0,)))).forward([np.arange(2), np.arange(2)])
    [array([1, 0]), array([0, 1])]
    """

    operations: tuple[Operation, ...]

    def shapes(self, shapes: list[Shape]) -> list[Shape]:
        return [each.shapes([shape])[0] for each, shape in zip(self.operations, shapes, strict=True)]

    def forward(self, arrays: list[Array]) -> list[Array]:
        return [each.forward([array])[0] for each, array in zip(self.operations, arrays, strict=True)]

    def backward(self, arrays: list[Array]) -> list[Array]:
        return [each.backward([array])[0] for each, array in zip(self.operations, arrays, strict=True)]


@dataclasses.dataclass(frozen=True)
class Chain(Moves):
    """Several operations one after the other, as one: for an array in `Apart` that takes more than one.

    >>> import numpy as np
    >>> Chain((Transpose((1, 0)), Reshape((3, 2), (6,)))).forward([np.zeros((2, 3))])[0].shape
    (6,)
    """

    operations: tuple[Operation, ...]

    def shapes(self, shapes: list[Shape]) -> list[Shape]:
        for operation in self.operations:
            shapes = operation.shapes(shapes)
        return shapes

    def forward(self, arrays: list[Array]) -> list[Array]:
        for operation in self.operations:
            arrays = operation.forward(arrays)
        return arrays

    def backward(self, arrays: list[Array]) -> list[Array]:
        for operation in reversed(self.operations):
            arrays = operation.backward(arrays)
        return arrays


@dataclasses.dataclass(frozen=True)
class Merge:
    """One native bias for two canonical biases that are added: `backward` adds them, `forward` returns the second as
    zeros.

    Args:
        kept: indices of the second bias's equal blocks that the framework stores separately, in a second native array;
            empty if it has only one bias. Keras's LSTM and GRU with one bias: `Merge()`. flax's GRU, whose last gate
            has a separate recurrent bias: `Merge(kept=(2,), blocks=3)`.
        blocks: number of equal blocks of the bias.
        absent: indices of blocks whose second bias cannot be added to the first, and which the framework lacks:
            `backward` accepts only zeros there. nnx's GRU, which has only one bias and resets after the product:
            `Merge(blocks=3, absent=(2,))`.
        added: constant for each block that the framework's formula adds itself. The second bias is this constant, so
            that the first equals the native bias bit for bit. haiku's LSTM, which adds 1 to the forget gate:
            `Merge(blocks=4, added=(0, 1, 0, 0))`.

    >>> import numpy as np
    >>> Merge().backward([np.array([1.0]), np.array([2.0])])
    [array([3.])]
    """

    kept: tuple[int, ...] = ()
    blocks: int = 1
    absent: tuple[int, ...] = ()
    added: tuple[float, ...] = ()

    def shapes(self, shapes: list[Shape]) -> list[Shape]:
        return [shapes[0], shapes[0]]

    def forward(self, arrays: list[Array]) -> list[Array]:
        second = np.zeros_like(arrays[0])
        for part, number in zip(np.split(second, self.blocks), self.added, strict=False):  # views
            part[...] = number
        return [arrays[0], self._with_kept(second, arrays)]

    def backward(self, arrays: list[Array]) -> list[Array]:
        parts = self._less_added(arrays[1])
        if any(parts[number].any() for number in self.absent):
            raise PortError(
                f"a recurrent bias, its blocks {list(self.absent)} of {self.blocks}, has no place in the target, whose "
                "formula adds no bias there; only zeros can be moved."
            )
        merged = [np.zeros_like(part) if number in self.kept else part for number, part in enumerate(parts)]
        first = arrays[0] + np.concatenate(merged) if any(part.any() for part in merged) else arrays[0]
        return [first, np.concatenate([parts[number] for number in self.kept])] if self.kept else [first]

    def gradients(self, arrays: list[Array]) -> list[Array]:
        """Return the gradient of the sum for both biases; a separately stored block gets its own gradient."""
        return [arrays[0], self._with_kept(np.array(arrays[0]), arrays)]

    def moments(self, arrays: list[Array]) -> list[Array]:
        """Return the mean of both biases' moments, which are equal unless they were decayed. A separately stored block
        gets its own moments."""
        first, second = (np.split(array, self.blocks) for array in arrays)
        pairs = enumerate(zip(first, second, strict=True))
        merged = [one if number in self.kept else (one + other) / 2 for number, (one, other) in pairs]
        apart = [np.concatenate([second[number] for number in self.kept])] if self.kept else []
        return [np.concatenate(merged).astype(arrays[0].dtype, copy=False), *apart]

    def loses(self, arrays: list[Array]) -> str:
        lost = any(part.any() for number, part in enumerate(self._less_added(arrays[1])) if number not in self.kept)
        return "two biases are added into one" if lost else ""

    def _with_kept(self, second: Array, arrays: list[Array]) -> Array:
        """Write the blocks that are stored separately into the second bias, and return it."""
        if self.kept:
            parts = np.split(second, self.blocks)  # views
            for number, values in zip(self.kept, np.split(arrays[1], len(self.kept)), strict=True):
                parts[number][...] = values
        return second

    def _less_added(self, second: Array) -> list[Array]:
        parts = np.split(second, self.blocks)
        if not self.added:
            return parts
        return [part - np.asarray(number, part.dtype) for part, number in zip(parts, self.added, strict=True)]


@dataclasses.dataclass(frozen=True)
class Shift:
    """Constant that the framework's formula adds to some equal blocks of an array: haiku's LSTM adds 1 to the forget
    gate, some norms 1 to their scale. A canonical array is the native one plus `constant` there.

    Adding and subtracting rounds: `loses` reports it if the inverse does not restore the same bits.

    >>> import numpy as np
    >>> Shift(1.0, (1,), 2).forward([np.zeros(4)])[0].tolist()
    [0.0, 0.0, 1.0, 1.0]
    """

    constant: float
    chosen: tuple[int, ...] = (0,)
    blocks: int = 1
    axis: int = -1

    def shapes(self, shapes: list[Shape]) -> list[Shape]:
        return shapes

    def forward(self, arrays: list[Array]) -> list[Array]:
        return [self._moved(array, self.constant) for array in arrays]

    def backward(self, arrays: list[Array]) -> list[Array]:
        return [self._moved(array, -self.constant) for array in arrays]

    def gradients(self, arrays: list[Array]) -> list[Array]:
        return arrays

    def moments(self, arrays: list[Array]) -> list[Array]:
        return arrays

    def loses(self, arrays: list[Array]) -> str:
        there = self.forward(self.backward(arrays))
        exact = all(np.array_equal(one, other) for one, other in zip(arrays, there, strict=True))
        return "" if exact else f"the framework adds {self.constant:g} itself, which rounds the last bit"

    def _moved(self, array: Array, constant: float) -> Array:
        moved = np.array(array)
        parts = np.split(moved, self.blocks, self.axis)
        for number in self.chosen:
            parts[number][...] += np.asarray(constant, moved.dtype)
        return moved

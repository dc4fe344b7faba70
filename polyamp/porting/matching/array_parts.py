"""`StackedPart`: one of the layers that a stacked array holds, such as keys and values in one einsum kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from polyamp.porting.layouts.inventory import InventoryLeaf, NativeLayer
from polyamp.porting.layouts.layer_layout import Form
from polyamp.porting.layouts.lazy_array import Lazy


class StackedPart(NamedTuple):
    """Place of a part.

    Attributes:
        whole: the layer with the stacked array.
        number: index of the part.
        axis: axis that stacks the parts.
    """

    whole: NativeLayer
    number: int
    axis: int


Parts = dict[str, StackedPart]
"""Path of a part -> its place."""


def split_layer(layer: NativeLayer, axis: int, form: Form) -> list[NativeLayer]:
    """Return the parts of a layer with one array, as layers for the matching: "path/0", "path/1".

    Args:
        layer: the layer.
        axis: axis that stacks the parts.
        form: form of each part.
    """
    ((name, leaf),) = layer.leaves.items()
    shape = leaf.array.shape
    made = []
    for number in range(shape[axis]):
        array = Lazy((*shape[:axis], *shape[axis + 1 :]), leaf.array.dtype, _part_reader(leaf.array, axis, number))
        part = InventoryLeaf(f"{leaf.name}[{number}]", array, leaf.trainable)
        made.append(NativeLayer(f"{layer.path}/{number}", {name: part}, (form,), layer.module))
    return made


def _part_reader(array: Lazy, axis: int, number: int) -> Callable[[], np.ndarray[Any, Any]]:
    return lambda: np.take(array.read(), number, axis)

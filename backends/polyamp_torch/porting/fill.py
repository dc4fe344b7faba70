"""Values into a model's tensors, in place and whole: all of them, or the model is as it was.

Called by `converter`. Every array is read once before the first tensor is written, so that what cannot be read is
found in time. An array that is a view of memory which stays (a tensor, a mapped file) is looked at again for the
writing: that costs nothing, and lets a mapped file's pages go one array after another. One that is made anew by every
read is kept while all such are small, and else read again; what those replace is kept by an `Undo`, which has a file
for what is large. So memory holds little more than the two models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from polyamp.errors import PortError
from polyamp.porting.layouts.lazy import Lazy
from polyamp.porting.undo import Undo, stays
from polyamp_torch.porting.tensors import as_array, numpy_dtype, place_of, write
from polyamp_torch.porting.walk import module_of, named_tensors
from polyamp_torch.step.interrupts import Undisturbed

Array = np.ndarray[Any, Any]
_SMALL: Final = 1 << 24
_SHARE: Final = 0.05
"""Of the model, what may be kept of arrays that every read makes anew; `_SMALL` bytes in any case."""


class _Write(NamedTuple):
    name: str
    tensor: torch.Tensor
    array: Lazy
    held: Array | None
    stays: bool = False


def fill(model: Any, leaves: Mapping[str, Lazy]) -> Any:
    """The model, with these values in the tensors of these names.

    Raises:
        PortError: a name that the model does not have, another shape or dtype, a tensor that cannot be written to.
        Exception: what reading an array raised; the model is then as it was.
    """
    targets = _targets(named_tensors(module_of(model)), leaves)
    writes = _read(targets)
    writes.sort(key=lambda each: each.stays or each.held is not None)  # what is read again first: it is what can fail
    tensors = {each.name: each.tensor for each in writes}
    with Undisturbed(), Undo() as undo:
        try:
            for each in writes:
                array = each.held
                if array is None:
                    array = each.array.read()
                    if not each.stays:
                        undo.keep(each.name, as_array(each.tensor))
                write(each.tensor, array)
        except BaseException:
            for name, old in undo:
                write(tensors[name], old)
            raise
    return model


def _targets(tensors: Mapping[str, torch.Tensor], leaves: Mapping[str, Lazy]) -> list[_Write]:
    """What is to be written, each memory once."""
    found: dict[tuple[Any, ...], _Write] = {}
    for name, array in leaves.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise PortError(f"the model has no tensor {name!r}.")
        dtype = numpy_dtype(tensor.dtype)
        if tuple(tensor.shape) != array.shape or dtype != array.dtype:
            raise PortError(
                f"{name!r} is {dtype}{list(tensor.shape)} in the model. Received: {array.dtype}{list(array.shape)}."
            )
        if tensor.device.type == "meta":
            raise PortError(
                f"{name!r} is on the meta device, which holds no values. Give the model memory first: "
                'model.to_empty(device="cpu").'
            )
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise PortError(f"{name!r} is an expanded tensor: several of its elements are one. Store a copy of it.")
        found.setdefault(place_of(tensor), _Write(name, tensor, array, None))
    return list(found.values())


def _read(targets: list[_Write]) -> list[_Write]:
    """The same with the arrays that may be kept."""
    budget = max(_SMALL, int(_SHARE * sum(each.array.nbytes for each in targets)))
    found = []
    for each in targets:
        array = each.array.read()
        if stays(array, each.array):
            found.append(each._replace(stays=True))
            continue
        budget -= array.nbytes
        if budget < 0:
            budget += array.nbytes
            array = None  # type: ignore[assignment]  # read again when its turn comes
        found.append(each._replace(held=array))
    return found

"""In-place assignment of values to a model's tensors. Either all tensors are written, or the model stays unchanged.

Every array is read once before the first tensor is written, so that unreadable arrays are found in time. There are
three cases:

- An array that is a view of permanent memory (a tensor, a mapped file) is read again for writing. That costs nothing,
  and lets the pages of a mapped file be released one array after another.
- An array that every read creates again is kept while all such arrays are small.
- Other arrays are read again. The values that they replace are kept by a `Rollback`, which stores large ones in a file.

Memory use is therefore little more than the two models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from polyamp.errors import PortError
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp.porting.rollback import Rollback, is_stable_view
from polyamp_torch.porting.inventory import named_tensors, unwrap_module
from polyamp_torch.porting.torch_only.tensor_io import as_array, numpy_dtype, storage_key, write_tensor
from polyamp_torch.step.torch_only.interrupts import DeferInterrupts

Array = np.ndarray[Any, Any]
_MIN_BUDGET: Final = 1 << 24
_BUDGET_SHARE: Final = 0.05
"""Share of the model that may be kept of arrays that every read creates again; at least `_MIN_BUDGET` bytes."""


class _TensorWrite(NamedTuple):
    name: str
    tensor: torch.Tensor
    array: Lazy
    held: Array | None
    stays: bool = False


def fill(model: Any, leaves: Mapping[str, Lazy]) -> Any:
    """Write these values into the tensors of these names, and return the model.

    Raises:
        PortError: the model has no such name, a shape or dtype differs, or a tensor cannot be written to.
        Exception: reading an array failed; the model is then unchanged.
    """
    targets = _plan_writes(named_tensors(unwrap_module(model)), leaves)
    writes = _read_ahead(targets)
    writes.sort(key=lambda each: each.stays or each.held is not None)  # arrays to be read again first: they can fail
    tensors = {each.name: each.tensor for each in writes}
    with DeferInterrupts(), Rollback() as undo:
        try:
            for each in writes:
                array = each.held
                if array is None:
                    array = each.array.read()
                    if not each.stays:
                        undo.keep(each.name, as_array(each.tensor))
                write_tensor(each.tensor, array)
        except BaseException:
            for name, old in undo:
                write_tensor(tensors[name], old)
            raise
    return model


def _plan_writes(tensors: Mapping[str, torch.Tensor], leaves: Mapping[str, Lazy]) -> list[_TensorWrite]:
    """Return the writes, one for each memory."""
    found: dict[tuple[Any, ...], _TensorWrite] = {}
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
        found.setdefault(storage_key(tensor), _TensorWrite(name, tensor, array, None))
    return list(found.values())


def _read_ahead(targets: list[_TensorWrite]) -> list[_TensorWrite]:
    """Return the same writes, with the arrays that fit the budget."""
    budget = max(_MIN_BUDGET, int(_BUDGET_SHARE * sum(each.array.nbytes for each in targets)))
    found = []
    for each in targets:
        array = each.array.read()
        if is_stable_view(array, each.array):
            found.append(each._replace(stays=True))
            continue
        budget -= array.nbytes
        if budget < 0:
            budget += array.nbytes
            array = None  # type: ignore[assignment]  # read again when it is written
        found.append(each._replace(held=array))
    return found

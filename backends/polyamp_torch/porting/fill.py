"""In-place assignment of values to a model's tensors. Either all tensors are written, or the model stays unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from polyamp.errors import PortError
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp.porting.rollback import read_ahead, write_all
from polyamp_torch.porting.inventory import named_tensors, unwrap_module
from polyamp_torch.porting.torch_only.numpy_conversion import as_array, numpy_dtype, storage_key, write_tensor
from polyamp_torch.step.torch_only.critical_section import DeferInterrupts


def fill(model: Any, leaves: Mapping[str, Lazy]) -> Any:
    """Write these values into the tensors of these names, and return the model.

    Raises:
        PortError: the model has no such name, a shape or dtype differs, or a tensor cannot be written to.
        Exception: reading an array failed; the model is then unchanged.
    """
    tensors = named_tensors(unwrap_module(model))
    writes = read_ahead(_check_writes(tensors, leaves))
    with DeferInterrupts():
        write_all(
            writes,
            lambda name: as_array(tensors[name]),
            lambda name, values: write_tensor(tensors[name], values),
        )
    return model


def _check_writes(tensors: Mapping[str, torch.Tensor], leaves: Mapping[str, Lazy]) -> dict[str, Lazy]:
    """Return the arrays to be written, one for each memory."""
    found: dict[tuple[Any, ...], str] = {}
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
        found.setdefault(storage_key(tensor), name)
    return {name: leaves[name] for name in found.values()}

"""Conversion between tensors and NumPy arrays, without a copy where possible, for any strides and for 16-bit dtypes.

torch's copy is fast only between a matrix and its full transpose. `polyamp.porting.files.strided_copies` is also fast
for slices and for more axes.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from polyamp.errors import PortError
from polyamp.porting.files.strided_copies import as_contiguous, copy_into
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp_torch.arrays import CARRIER_DTYPES, FOREIGN_DTYPES, dtype_name, from_numpy, memory_address, shared_array

Array = np.ndarray[Any, Any]

_LARGE_COPY: Final = 1 << 16


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any] | None:
    """Return the NumPy dtype of a torch dtype; None if there is none."""
    if dtype in FOREIGN_DTYPES:
        return FOREIGN_DTYPES[dtype]
    try:
        known: np.dtype[Any] = np.dtype(dtype_name(dtype))
    except TypeError:  # quantized dtypes, complex32, sub-byte dtypes
        return None
    return known


def to_lazy(tensor: torch.Tensor, name: str) -> Lazy:
    """Return a tensor as a lazily read array; for a tensor on the host, a view.

    Raises:
        PortError: the tensor is not plain and dense, or NumPy has no dtype for its values.
    """
    dtype = numpy_dtype(tensor.dtype)
    if dtype is None or tensor.layout != torch.strided or hasattr(tensor, "__tensor_flatten__"):
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        raise PortError(
            f"{name!r} cannot be moved: it is a {kind} of dtype {dtype_name(tensor.dtype)} and layout {tensor.layout}. "
            "Accepted are plain, dense tensors: gather what is sharded and dequantize what is quantized first."
        )
    return Lazy(tuple(tensor.shape), dtype, lambda: as_array(tensor, name))


def as_array(tensor: torch.Tensor, name: str = "") -> Array:
    """Return the values of a tensor, as a view of its memory if that is on the host."""
    if tensor.device.type == "meta":
        raise PortError(
            f"{name!r} is on the meta device, so it has no values to move. Give the model memory and weights first "
            '(model.to_empty(device="cpu"), then load_state_dict).'
        )
    return shared_array(tensor.detach().cpu().resolve_conj().resolve_neg())


def write_tensor(tensor: torch.Tensor, array: Array) -> None:
    """Copy an array of the same shape and dtype into a tensor, whatever the strides of both."""
    if tensor.device.type == "cpu":
        if array.ndim == 2 and array.nbytes >= _LARGE_COPY and array.T.flags.c_contiguous and tensor.is_contiguous():
            _write_transposed(tensor, array.T)
            return
        copy_into(as_array(tensor), array)
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)  # so that autograd detects this write
        return
    host = from_numpy(as_contiguous(array))
    with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
        tensor.detach().copy_(host)


class _ReadOnlyMemory:
    """Memory of a read-only array, wrapped so that torch accepts it without a warning. The resulting tensor is never
    written."""

    def __init__(self, array: Array) -> None:
        self.array = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def _write_transposed(tensor: torch.Tensor, array: Array) -> None:
    """Copy the transpose of a whole matrix with torch's own copy, which is 1.5 times as fast here."""
    if tensor.dtype in FOREIGN_DTYPES:
        carrier = CARRIER_DTYPES[array.dtype.itemsize]
        tensor, array = tensor.detach().view(carrier), array.view(np.dtype(dtype_name(carrier)))
    lent = torch.from_numpy(np.asarray(_ReadOnlyMemory(array)))
    with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
        tensor.detach().copy_(lent.t())


def storage_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that two tensors share if they are one array: the object, or the whole of their memory."""
    if tensor.device.type == "meta" or not tensor.numel():
        return (id(tensor),)
    address = memory_address(tensor), tensor.storage_offset()
    return tensor.device, *address, tensor.dtype, tuple(tensor.shape), tensor.stride()

"""Tensors as NumPy arrays and back without a copy where there is a way, strides and 16-bit dtypes included.

Called by `walk`, which lists a model's tensors, `fill`, which writes them, `evaluate` and `files`. NumPy copies a
transposed array of a dtype that it does not know itself one element at a time; torch's own copy of a strided tensor is
as fast for bfloat16 as for any other.
"""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np
import torch

from polyamp.errors import PortError
from polyamp.porting.lazy import Lazy
from polyamp_torch.arrays import dtype_name

Array = np.ndarray[Any, Any]

_FOREIGN: Final = ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
"""Dtypes that NumPy has from ml_dtypes, under the same names."""
_CARRIERS: Final = {1: torch.uint8, 2: torch.int16}
"""Bytes of an element -> a dtype that both NumPy and torch know, for the way between them."""


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any] | None:
    """The NumPy dtype of a torch dtype; None if there is none."""
    name = dtype_name(dtype)
    try:
        known: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name) if name in _FOREIGN else name)
    except TypeError:  # quantized ones, complex32, a number of bits
        return None
    return known


def lazy(tensor: torch.Tensor, name: str) -> Lazy:
    """A tensor that is read when somebody needs it; of a tensor on the host, a view.

    Raises:
        PortError: no array has what it holds.
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
    """The values of a tensor, as a view of its memory if that is the host's."""
    if tensor.device.type == "meta":
        raise PortError(
            f"{name!r} is on the meta device, so it has no values to move. Give the model memory and weights first "
            '(model.to_empty(device="cpu"), then load_state_dict).'
        )
    host = tensor.detach().cpu().resolve_conj().resolve_neg()
    if dtype_name(host.dtype) not in _FOREIGN:
        plain: Array = host.numpy()
        return plain
    dtype = numpy_dtype(host.dtype)
    assert dtype is not None
    foreign: Array = host.view(_CARRIERS[dtype.itemsize]).numpy().view(dtype)
    return foreign


class _Lent:
    """Memory of a read-only array, which torch takes without a warning. Nobody writes to the tensors made of it."""

    def __init__(self, array: Array) -> None:
        self.array = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def as_tensor(array: Array) -> torch.Tensor:
    """An array as a tensor on the host, to copy from and not to write to; shares memory wherever torch can."""
    foreign = array.dtype.name if array.dtype.name in _FOREIGN else ""
    if foreign:
        array = array.view(np.dtype(f"i{array.dtype.itemsize}" if array.dtype.itemsize > 1 else "u1"))
    turned = [axis for axis, stride in enumerate(array.strides) if stride < 0]
    if turned:
        array = np.flip(array, tuple(turned))  # torch has no strides below 0: the memory forward, then turned by torch
    if not array.dtype.isnative or any(stride % array.itemsize for stride in array.strides):
        array = np.array(array, dtype=array.dtype.newbyteorder("="))
    elif not array.flags.writeable and array.size:
        array = np.asarray(_Lent(array))
    tensor = torch.from_numpy(array)
    if turned:
        tensor = tensor.flip(turned)
    return tensor.view(getattr(torch, foreign)) if foreign else tensor


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What two tensors share that are one array: the object, or the whole of their memory."""
    if tensor.device.type == "meta" or not tensor.numel():
        return (id(tensor),)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()

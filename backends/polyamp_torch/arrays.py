"""torch as an array namespace: dtype names, trees, casting, and transfer between NumPy and devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final

import ml_dtypes
import numpy as np
import torch
from torch import nn

from polyamp.array_namespace import array_namespace
from polyamp.float_formats import FORMATS, HALF_DTYPES, ML_DTYPES
from polyamp.rules.batches import check_has_rows, host_array
from polyamp.trees import map_tree

DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in FORMATS}
"""Canonical name -> torch dtype."""
HALF_TENSOR_DTYPES: Final = tuple(DTYPES[name] for name in HALF_DTYPES)
"""The 16-bit dtypes."""
_FLOAT8_DTYPES: Final = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
FOREIGN_DTYPES: Final[dict[torch.dtype, np.dtype[Any]]] = {
    getattr(torch, name): np.dtype(getattr(ml_dtypes, name)) for name in (*ML_DTYPES, *_FLOAT8_DTYPES)
}
"""torch dtype that NumPy gets from ml_dtypes -> NumPy's. torch exchanges their memory in another dtype alone."""
_TENSOR_DTYPES: Final = {foreign: dtype for dtype, foreign in FOREIGN_DTYPES.items()}
CARRIER_DTYPES: Final = {1: torch.uint8, 2: torch.int16}
"""Bytes of an element of a foreign dtype -> the dtype in which its memory is exchanged."""


def scalar_like(value: Any, like: Any) -> Any:
    """Return `value`, a number or a scalar tensor, as a scalar tensor with the dtype and device of `like`."""
    if isinstance(value, torch.Tensor):
        return value.to(like.device, like.dtype)
    return torch.full((), value, dtype=like.dtype, device=like.device)


def _cast(x: Any, dtype: Any) -> Any:
    return x.to(DTYPES[dtype] if isinstance(dtype, str) else dtype.dtype)


def _gather(x: Any) -> Any:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _scatter(x: Any, like: Any) -> Any:
    if not hasattr(like, "full_tensor"):
        return x
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None)


XP: Final = array_namespace(
    torch,
    scalar_like,
    power=torch.pow,
    clip=torch.clamp,
    norm=lambda x: _gather(torch.linalg.vector_norm(x)),
    mean=lambda x, axis: torch.mean(x, axis, keepdim=True),
    matmul=torch.matmul,
    swapaxes=torch.swapaxes,
    astype=_cast,
    gather=_gather,
    scatter=_scatter,
)
"""torch's array namespace; scalars stay on their device. A sharded tensor (DTensor) is gathered to a plain one."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the canonical name of a torch dtype: "float16", "int32", ..."""
    return str(dtype).removeprefix("torch.")


def is_castable(leaf: Any, *, float64: bool) -> bool:
    """Return whether a leaf is a real floating tensor; float64 ones count only if the policy names float64 (S2)."""
    if not isinstance(leaf, torch.Tensor):
        return False
    dtype = leaf.dtype
    return dtype.is_floating_point and (float64 or dtype != torch.float64)


def describe_device(device: torch.device) -> str:
    """Return a device's name, with the model of a GPU: `cuda:0 (NVIDIA H100)`."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def cast_tree(tree: Any, dtype: str, *, float64: bool = False) -> Any:
    """Cast the floating leaves of a tree to `dtype`, differentiably; other leaves are unchanged (S2)."""
    target = DTYPES[dtype]
    if isinstance(tree, torch.Tensor):  # as most outputs are
        return tree.to(target) if is_castable(tree, float64=float64) else tree
    return map_tree(lambda leaf: leaf.to(target) if is_castable(leaf, float64=float64) else leaf, tree)


def detach_leaf(leaf: Any) -> Any:
    """Return a leaf of a tree, detached from the autograd graph if it is a tensor."""
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def to_device(tree: Any, device: torch.device, parameters: str) -> Any:
    """Convert a batch's NumPy leaves to tensors, and move every tensor to `device`.

    Args:
        tree: the batch.
        device: the target device.
        parameters: the policy's `param` dtype, which determines the conversion of NumPy's float64 (S26).

    Raises:
        BatchError: none of the arrays has a row.
    """
    lengths: list[int] = []

    def move(leaf: Any) -> Any:
        if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind not in "OUSM":  # text and objects stay
            leaf = from_numpy(np.asarray(host_array(leaf, parameters)))
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.dim():
            lengths.append(leaf.size(0))  # a nested tensor has no shape
        return leaf.to(device, non_blocking=True)

    moved = map_tree(move, tree)
    if 0 in lengths:
        check_has_rows(lengths)
    return moved


def from_numpy(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Convert a NumPy array to a CPU tensor of the same dtype, also those of ml_dtypes; share memory if possible."""
    if array.dtype in _TENSOR_DTYPES:
        carrier = dtype_name(CARRIER_DTYPES[array.dtype.itemsize])
        return from_numpy(array.view(carrier)).view(_TENSOR_DTYPES[array.dtype])
    usable = array.dtype.isnative and all(stride >= 0 for stride in array.strides)
    if usable and array.flags.writeable and array.ndim:
        return torch.from_numpy(array)
    # a copy: torch warns about read-only memory, and supports neither negative strides nor foreign byte orders
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))


def as_tensor(value: Any) -> torch.Tensor:
    """Return a tensor unchanged, and a NumPy array converted by `from_numpy`."""
    return value if isinstance(value, torch.Tensor) else from_numpy(value)


def memory_address(tensor: torch.Tensor) -> int:
    """Return where a tensor's memory begins: one number for all views of it, another for every tensor without memory of
    its own (on the device "meta", or of a subclass that wraps others)."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except RuntimeError:
        return id(tensor)


def is_sharded(tensor: Any) -> bool:
    """Return whether a tensor is sharded over processes (a `DTensor`), without importing `torch.distributed.tensor`."""
    return hasattr(tensor, "device_mesh")


def fill_tensor(target: Any, value: Any) -> None:
    """Copy into a tensor, in place; into a sharded target, the local shard of an unsharded value."""
    if is_sharded(target) and not is_sharded(value):
        (chunk,) = target.__create_chunk_list__()  # torch.distributed.checkpoint calls it too
        part = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        target.to_local().copy_(value[part])
    else:
        target.copy_(value)


def to_numpy(tensor: Any) -> np.ndarray[Any, Any]:
    """Return a copy of a tensor on the host. A sharded tensor is gathered: every rank must call this."""
    if not isinstance(tensor, torch.Tensor):
        return np.array(tensor)
    whole: Any = tensor
    if is_sharded(whole):
        whole = whole.detach().full_tensor()
    host: torch.Tensor = whole.detach().to("cpu", copy=True)
    return shared_array(host.resolve_conj().resolve_neg())


def shared_array(host: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the values of a plain tensor on the host as an array on the same memory."""
    foreign = FOREIGN_DTYPES.get(host.dtype)
    if foreign is None:
        return host.numpy()
    carried: np.ndarray[Any, Any] = host.view(CARRIER_DTYPES[foreign.itemsize]).numpy()
    return carried.view(foreign)


def output_tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a module's output, in the order of its fields: sparse ones dense, of packed sequences the
    data."""
    if isinstance(tree, torch.Tensor):
        yield tree.to_dense() if tree.is_sparse else tree
    elif isinstance(tree, nn.utils.rnn.PackedSequence):
        yield tree.data
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from output_tensors(value)
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from output_tensors(item)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from output_tensors(getattr(tree, field.name, None))


def can_read_without_sync(device: torch.device) -> bool:
    """Return whether the host can read a scalar without a synchronisation, outside of compilation."""
    return device.type == "cpu" and not torch.compiler.is_compiling()

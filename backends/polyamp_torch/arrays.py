"""torch as an array namespace: dtype names, trees, casting, and the way between NumPy and a device.

Called by every other module of this package.
"""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np
import torch

from polyamp.arrays import ArrayNamespace
from polyamp.rules.batches import check_has_rows, host_array
from polyamp.trees import map_tree

DTYPES: Final[dict[str, torch.dtype]] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


class TorchNamespace:
    """`ArrayNamespace` over torch; scalars stay on their device."""

    def where(self, condition: Any, x: Any, y: Any, /) -> Any:
        return torch.where(condition, x, y)

    def minimum(self, x: Any, y: Any, /) -> Any:
        return torch.minimum(x, y)

    def maximum(self, x: Any, y: Any, /) -> Any:
        return torch.maximum(x, y)

    def asarray(self, value: Any, like: Any, /) -> Any:
        return torch.full((), value, dtype=like.dtype, device=like.device)

    def sqrt(self, x: Any, /) -> Any:
        return torch.sqrt(x)

    def sign(self, x: Any, /) -> Any:
        return torch.sign(x)

    def cos(self, x: Any, /) -> Any:
        return torch.cos(x)

    def floor(self, x: Any, /) -> Any:
        return torch.floor(x)

    def power(self, x: Any, y: Any, /) -> Any:
        return torch.pow(x, y)

    def expm1(self, x: Any, /) -> Any:
        return torch.expm1(x)


XP: Final[ArrayNamespace] = TorchNamespace()


def dtype_name(dtype: torch.dtype) -> str:
    """The canonical name of a torch dtype: "float16", "int32", ..."""
    return str(dtype).removeprefix("torch.")


def is_castable(leaf: Any, *, float64: bool) -> bool:
    """True for a real floating tensor; for a float64 one only if the policy names float64 (S2)."""
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and (float64 or leaf.dtype != torch.float64)


def cast_tree(tree: Any, dtype: str, *, float64: bool = False) -> Any:
    """A tree with its floating leaves in `dtype`, differentiably; everything else untouched (S2)."""
    target = DTYPES[dtype]
    return map_tree(lambda leaf: leaf.to(target) if is_castable(leaf, float64=float64) else leaf, tree)


def to_device(tree: Any, device: torch.device, parameters: str) -> Any:
    """A batch with NumPy leaves turned into tensors, and every tensor on `device`.

    Args:
        tree: the batch.
        device: where to.
        parameters: the policy's `param` dtype, which decides what becomes of NumPy's float64 (S26).

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
    check_has_rows(lengths)
    return moved


def from_numpy(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A NumPy array as a CPU tensor of the same dtype, `ml_dtypes.bfloat16` included; shares memory where it may."""
    if array.dtype == ml_dtypes.bfloat16:
        return from_numpy(array.view(np.int16)).view(torch.bfloat16)
    usable = array.dtype.isnative and all(stride >= 0 for stride in array.strides)
    if usable and array.flags.writeable and array.ndim:
        return torch.from_numpy(array)
    # a copy: torch warns of memory that it must not write to, and has no reversed strides and no foreign byte order
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))


def as_tensor(value: Any) -> torch.Tensor:
    """A tensor as it is, a NumPy array as `from_numpy` makes one of it."""
    return value if isinstance(value, torch.Tensor) else from_numpy(value)


def is_divided(tensor: Any) -> bool:
    """Whether several processes hold a tensor together (a `DTensor`), without importing what they are made of."""
    return hasattr(tensor, "device_mesh")


def fill(target: Any, value: Any) -> None:
    """Copy into a tensor, in place; of a whole one its part where several processes hold the target together."""
    if is_divided(target) and not is_divided(value):
        (chunk,) = target.__create_chunk_list__()  # what torch.distributed.checkpoint asks every tensor for
        part = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        target.to_local().copy_(value[part])
    else:
        target.copy_(value)


def to_numpy(tensor: Any) -> np.ndarray[Any, Any]:
    """A copy of a tensor on the host. One that several processes hold together is gathered: each of them calls it."""
    if not isinstance(tensor, torch.Tensor):
        return np.array(tensor)
    whole: Any = tensor
    if is_divided(whole):
        whole = whole.detach().full_tensor()
    host: torch.Tensor = whole.detach().to("cpu", copy=True)
    if host.dtype == torch.bfloat16:
        return host.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    result: np.ndarray[Any, Any] = host.resolve_conj().resolve_neg().numpy()
    return result

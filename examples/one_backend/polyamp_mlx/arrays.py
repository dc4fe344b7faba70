"""Array functions for MLX: dtype names, conversion from and to NumPy, casting of trees, the array namespace."""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import mlx.core as mx
import numpy as np

from polyamp.array_namespace import array_namespace
from polyamp.trees import leaves, map_tree

Array = np.ndarray[Any, Any]
DTYPES: Final = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32, "float64": mx.float64}


def device_name() -> str:
    """Return the name of MLX's device: "cpu", or "gpu" on a Mac."""
    return str(mx.default_device().type).rpartition(".")[2]


def dtype_name(array: Any) -> str:
    """Return the canonical name of an array's dtype, such as "bfloat16"."""
    return str(array.dtype).removeprefix("mlx.core.")


def is_floating(value: Any) -> bool:
    """Return whether a value is an array of a real floating dtype."""
    return isinstance(value, mx.array) and dtype_name(value) in DTYPES


def to_device(value: Any) -> Any:
    """Convert a NumPy array or scalar to an MLX array of its dtype; other values are unchanged.

    `mx.array` converts float64 to float32, as polyamp does with host arrays (S26).
    """
    return mx.array(np.asarray(value)) if isinstance(value, (np.ndarray, np.generic)) else value


def copy_array(array: mx.array) -> mx.array:
    """Return a copy of an array in row-major order.

    MLX keeps the strides of its inputs, and its products round differently by stride: equal arrays with other strides
    have results that differ in the last digit, so that a training would not be reproducible.
    """
    return mx.contiguous(mx.array(array))


def evaluate_arrays(tree: Any) -> Any:
    """Start the computation of a tree's arrays without waiting, and return the tree.

    MLX is lazy: an unevaluated graph would grow from step to step, and only the thread that made it can compute it.
    """
    mx.async_eval(*(leaf for _, leaf in leaves(tree) if isinstance(leaf, mx.array)))
    return tree


def to_numpy(array: Any) -> Array:
    """Return a copy on the host. NumPy's buffers have no bfloat16, so its bits are transferred."""
    if isinstance(array, mx.array) and array.dtype == mx.bfloat16:
        return np.array(array.view(mx.uint16)).view(ml_dtypes.bfloat16)
    return np.array(array)


def cast_tree(tree: Any, dtype: str, *, float64: bool = False) -> Any:
    """Cast a tree's floating leaves to `dtype`; other leaves, and float64 unless requested, are unchanged (S2)."""

    def cast(leaf: Any) -> Any:
        skipped = not is_floating(leaf) or (leaf.dtype == mx.float64 and not float64)
        return leaf if skipped else leaf.astype(DTYPES[dtype])

    return map_tree(cast, tree)


def _asarray(value: Any, like: Any) -> Any:
    return value.astype(like.dtype) if isinstance(value, mx.array) else mx.array(value, dtype=like.dtype)


XP: Final = array_namespace(
    mx,
    _asarray,
    norm=lambda x: mx.sqrt(mx.sum(x * x)),
    mean=lambda x, axis: mx.mean(x, axis, keepdims=True),
    matmul=mx.matmul,
    swapaxes=mx.swapaxes,
    astype=lambda x, dtype: x.astype(getattr(mx, dtype) if isinstance(dtype, str) else dtype.dtype),
)
"""The array namespace of MLX, for schedules, optimizer formulas and the loss scale's rule."""

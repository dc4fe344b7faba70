"""MLX's arrays as polyamp sees them: names of dtypes, the way in and out, casting of trees, the array namespace."""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import mlx.core as mx
import numpy as np

from polyamp.arrays import ArrayNamespace
from polyamp.trees import leaves, map_tree

Array = np.ndarray[Any, Any]
DTYPES: Final = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32, "float64": mx.float64}


def device() -> str:
    """The name of the device that MLX computes on: "cpu", or "gpu" on a Mac."""
    return str(mx.default_device().type).rpartition(".")[2]


def dtype_name(array: Any) -> str:
    """The canonical name of an array's dtype, such as "bfloat16"."""
    return str(array.dtype).removeprefix("mlx.core.")


def is_floating(value: Any) -> bool:
    """True for an array of a real floating dtype."""
    return isinstance(value, mx.array) and dtype_name(value) in DTYPES


def to_device(value: Any) -> Any:
    """A NumPy array or scalar as MLX's own, in its dtype; everything else as it is.

    `mx.array` takes float64 for float32, as polyamp does with host arrays (S26).
    """
    return mx.array(np.asarray(value)) if isinstance(value, (np.ndarray, np.generic)) else value


def fresh(array: mx.array) -> mx.array:
    """The same array as an object of its own, row after row in memory.

    MLX keeps the strides of what it computes from, and its products round by them: two equal arrays of other strides
    would give results that differ in the last digit, and a training would not repeat itself.
    """
    return mx.contiguous(mx.array(array))


def computed(tree: Any) -> Any:
    """A tree whose arrays are being computed: MLX is lazy, a graph that nobody asks for would grow from step to step,
    and only the thread that made it can compute it. This waits for nothing; whoever reads an array does."""
    mx.async_eval(*(leaf for _, leaf in leaves(tree) if isinstance(leaf, mx.array)))
    return tree


def to_numpy(array: Any) -> Array:
    """A copy on the host. NumPy's buffers know no bfloat16, so its bits are handed over."""
    if isinstance(array, mx.array) and array.dtype == mx.bfloat16:
        return np.array(array.view(mx.uint16)).view(ml_dtypes.bfloat16)
    return np.array(array)


def cast_tree(tree: Any, dtype: str, *, float64: bool = False) -> Any:
    """A tree with its floating leaves in `dtype`; everything else, and float64 unless named, untouched (S2)."""

    def cast(leaf: Any) -> Any:
        skipped = not is_floating(leaf) or (leaf.dtype == mx.float64 and not float64)
        return leaf if skipped else leaf.astype(DTYPES[dtype])

    return map_tree(cast, tree)


class MLXNamespace:
    """`ArrayNamespace` over MLX: what schedules, optimizers' formulas and the loss scale's rule are computed with."""

    where = staticmethod(mx.where)
    minimum = staticmethod(mx.minimum)
    maximum = staticmethod(mx.maximum)
    sqrt = staticmethod(mx.sqrt)
    sign = staticmethod(mx.sign)
    cos = staticmethod(mx.cos)
    floor = staticmethod(mx.floor)
    power = staticmethod(mx.power)
    expm1 = staticmethod(mx.expm1)

    def asarray(self, value: Any, like: Any, /) -> Any:
        return value.astype(like.dtype) if isinstance(value, mx.array) else mx.array(value, dtype=like.dtype)


XP: Final[ArrayNamespace] = MLXNamespace()

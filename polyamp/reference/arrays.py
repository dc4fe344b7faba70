"""NumPy as an array namespace, and casting of trees of NumPy arrays."""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np

from polyamp.array_namespace import array_namespace
from polyamp.float_formats import FORMATS
from polyamp.trees import map_tree

Array = np.ndarray[Any, Any]
DTYPES: Final[dict[str, np.dtype[Any]]] = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in FORMATS}


def _asarray(value: Any, like: Any) -> Any:
    return np.asarray(value, np.asarray(like).dtype)


XP: Final = array_namespace(
    np,
    _asarray,
    norm=lambda x: np.sqrt(np.sum(x * x)),
    mean=lambda x, axis: np.mean(x, axis, keepdims=True),
    matmul=np.matmul,
    swapaxes=np.swapaxes,
    astype=lambda x, dtype: x.astype(DTYPES[dtype] if isinstance(dtype, str) else dtype.dtype),
)
"""NumPy's array namespace."""


def dtype_name(dtype: Any) -> str:
    """Return the canonical name of a NumPy dtype, including those of `ml_dtypes`."""
    return str(np.dtype(dtype).name)


def is_floating(value: Any) -> bool:
    """Return whether a value is a NumPy array or scalar of a real floating dtype."""
    return isinstance(value, (np.ndarray, np.generic)) and dtype_name(value.dtype) in DTYPES


def cast_tree(tree: Any, dtype: str, *, float64: bool = False) -> Any:
    """Cast a tree's floating leaves to `dtype`; other leaves, and float64 unless requested, are unchanged (S2)."""

    def cast(leaf: Any) -> Any:
        if not is_floating(leaf) or (leaf.dtype == np.float64 and not float64):
            return leaf
        with np.errstate(over="ignore"):
            return leaf.astype(DTYPES[dtype])

    return map_tree(cast, tree)

"""Arrays of Keras's current backend: dtypes, variables and casts (S2)."""

from __future__ import annotations

from typing import Any

import keras
import ml_dtypes
import numpy as np

from polyamp.float_formats import FLOAT_DTYPES


def dtype_name(array: Any) -> str:
    """Return the canonical name of a dtype, such as "float32", of a tensor, Keras variable or NumPy array."""
    dtype = array.dtype
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


def native_variable(variable: Any) -> Any:
    """Return what a Keras variable contains: `tf.Variable`, `torch.nn.Parameter`, `jax.Array`; others unchanged."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def variable_key(variable: Any) -> int:
    """Return a key that two variables share if they are one: of the framework's variable, or of Keras's where the
    framework has arrays only, of which two variables may hold the same."""
    native = native_variable(variable)
    return id(native if hasattr(native, "assign") or hasattr(native, "requires_grad") else variable)


def numpy_dtype(array: Any) -> np.dtype[Any]:
    """Return the NumPy dtype of a tensor or variable; 16-bit and 8-bit floats that NumPy lacks are of ml_dtypes."""
    name = dtype_name(array)
    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name, name))
    return found


def read_value(variable: Any) -> Any:
    """Return the value of a variable, Keras's or the framework's, as a tensor. TensorFlow's variables are none."""
    native = native_variable(variable)
    return native.read_value() if hasattr(native, "read_value") else keras.ops.convert_to_tensor(native)


def variable_name(variable: Any) -> str:
    """Return a variable's path, or its name for a `tf.Variable`, which has no path."""
    return str(getattr(variable, "path", variable.name))


def at_least_float32(array: Any) -> str:
    """Return the dtype of an array's gradients and optimizer slots: float64 for float64, otherwise float32."""
    return "float64" if dtype_name(array) == "float64" else "float32"


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is a tensor, a variable or a NumPy array."""
    return isinstance(leaf, keras.Variable | np.ndarray | np.generic) or bool(keras.ops.is_tensor(leaf))


def is_floating(leaf: Any) -> bool:
    """Return whether a leaf is an array of real floating numbers (S2)."""
    return is_array(leaf) and dtype_name(leaf) in FLOAT_DTYPES


def cast(tree: Any, dtype: str, *, float64: bool = False) -> Any:
    """Cast the floating leaves of a tree to `dtype` (S2). NumPy leaves stay NumPy; other leaves are unchanged."""

    def cast_leaf(leaf: Any) -> Any:
        if not is_floating(leaf) or (dtype_name(leaf) == "float64" and not float64):
            return leaf
        if isinstance(leaf, np.ndarray | np.generic):
            return np.asarray(leaf).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        return keras.ops.cast(native_variable(leaf), dtype)

    return keras.tree.map_structure(cast_leaf, tree)


def leaves_with_paths(tree: Any) -> list[tuple[str, Any]]:
    """Return (path, leaf) of every leaf that is not None. A path is written as an index: "['x'][0]"."""
    return [
        ("".join(f"[{part!r}]" for part in path), leaf)
        for path, leaf in keras.tree.flatten_with_path(tree)
        if leaf is not None
    ]

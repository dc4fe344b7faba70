"""TensorFlow arrays: namespace for polyamp's formulas, casts (S2), and conversion to and from TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import keras
import numpy as np
import tensorflow as tf

from polyamp.array_namespace import array_namespace
from polyamp.errors import BatchError, GradientError, describe_value
from polyamp.float_formats import FLOAT_DTYPES
from polyamp.rules.batches import host_array

Array = np.ndarray[Any, Any]


def _asarray(value: Any, like: Any) -> Any:
    return tf.cast(value, like.dtype) if tf.is_tensor(value) else tf.constant(value, like.dtype)


def _swap_axes(x: Any, first: int, second: int) -> Any:
    order = list(range(x.shape.rank))
    order[first], order[second] = order[second], order[first]
    return tf.transpose(x, order)


XP: Final = array_namespace(
    tf,
    _asarray,
    power=tf.pow,
    expm1=tf.math.expm1,
    norm=tf.norm,
    mean=lambda x, axis: tf.reduce_mean(x, axis, keepdims=True),
    matmul=tf.linalg.matmul,
    swapaxes=_swap_axes,
    astype=lambda x, dtype: tf.cast(x, dtype if isinstance(dtype, str) else dtype.dtype),
)
"""The array namespace of tensors, eager and inside a `tf.function`."""


def dtype_name(array: Any) -> str:
    """Return the canonical name of a dtype, such as "float32", of a tensor, Keras variable or NumPy array."""
    return str(tf.as_dtype(array.dtype).name)


def native_variable(variable: Any) -> Any:
    """Return the `tf.Variable` inside a Keras variable; any other value unchanged."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def variable_name(variable: Any) -> str:
    """Return a variable's path, or its name for a `tf.Variable`, which has no path."""
    return str(getattr(variable, "path", variable.name))


def device_name(device: str) -> str:
    """Return type and number of a device from TensorFlow's name for it: `/physical_device:CPU:0` is `CPU:0`."""
    return device.rpartition("device:")[2]


def assign_values(variables: Iterable[Any], values: Iterable[Any]) -> None:
    """Assign each value to its variable."""
    for variable, value in zip(variables, values, strict=True):
        native_variable(variable).assign(value)


def at_least_float32(dtype: Any) -> Any:
    """Return the dtype of gradients and optimizer slots: float64 for float64, otherwise float32."""
    return tf.float64 if tf.as_dtype(dtype) == tf.float64 else tf.float32


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is a tensor, a variable or a NumPy array."""
    return isinstance(leaf, keras.Variable | np.ndarray | np.generic) or bool(tf.is_tensor(leaf))


def is_floating(leaf: Any) -> bool:
    """Return whether a leaf is an array of real floating numbers (S2)."""
    return is_array(leaf) and str(getattr(leaf.dtype, "name", leaf.dtype)) in FLOAT_DTYPES


def cast(tree: Any, dtype: str, *, float64: bool = False) -> Any:
    """Cast the floating leaves of a tree to `dtype` (S2). NumPy leaves stay NumPy; other leaves are unchanged."""

    def cast_leaf(leaf: Any) -> Any:
        if not is_floating(leaf) or (dtype_name(leaf) == "float64" and not float64):
            return leaf
        if isinstance(leaf, np.ndarray | np.generic):
            return np.asarray(leaf).astype(tf.as_dtype(dtype).as_numpy_dtype)
        return tf.cast(native_variable(leaf), dtype)

    return keras.tree.map_structure(cast_leaf, tree)


def scalar(value: float, dtype: str, *, like: Any = None) -> Any:
    """Return a new scalar tensor on the device of `like`, or on the default device."""
    device = getattr(native_variable(like), "device", None)
    with tf.device(device):
        return tf.constant(value, dtype)


def to_numpy(array: Any) -> Array:
    """Return a copy as a NumPy array; bfloat16 becomes `ml_dtypes.bfloat16`."""
    return np.array(tf.convert_to_tensor(native_variable(array)).numpy())


def leaves_with_paths(tree: Any) -> list[tuple[str, Any]]:
    """Return (path, leaf) of every leaf that is not None. A path is written as an index: "['x'][0]"."""
    return [
        ("".join(f"[{part!r}]" for part in path), leaf)
        for path, leaf in keras.tree.flatten_with_path(tree)
        if leaf is not None
    ]


def to_tensors(tree: Any, parameters: str = "float64") -> Any:
    """Convert a batch to tensors, Python scalars included, so that a new value does not cause a retrace.

    Values from a distributed dataset are unchanged.

    Args:
        tree: the batch, or gradients.
        parameters: the policy's `param` dtype, which decides how NumPy float64 in a batch is converted (S26).

    Raises:
        BatchError: a leaf that TensorFlow cannot convert.
    """

    def convert_leaf(leaf: Any) -> Any:
        if isinstance(leaf, tf.Variable):
            return tf.convert_to_tensor(leaf)
        if leaf is None or tf.is_tensor(leaf) or isinstance(leaf, tf.distribute.DistributedValues):
            return leaf
        if isinstance(leaf, np.ndarray | np.generic):
            leaf = host_array(leaf, parameters)
        try:
            return tf.convert_to_tensor(native_variable(leaf))
        except (TypeError, ValueError) as error:
            raise _leaf_error(tree, leaf) from error

    return keras.tree.map_structure(convert_leaf, tree)


def _leaf_error(batch: Any, leaf: Any) -> BatchError:
    """Return the error for a leaf that TensorFlow cannot convert."""
    paths = [path for path, other in leaves_with_paths(batch) if other is leaf]
    where = f"batch{paths[0] if paths else ''}"
    kind, advice = describe_value(leaf), f"Take it out of the batch, or convert it to numbers ({where})."
    if isinstance(leaf, np.ndarray):
        kind = "a NumPy array of Python objects, as it is made of rows of different length or of None"
        advice = "Pad the rows to one length, and give a mask; or use a tf.RaggedTensor."
    elif hasattr(type(leaf), "__dataclass_fields__"):
        kind, advice = f"{kind}, a dataclass", "Use a dict, a tuple or a NamedTuple: dataclasses.asdict(batch)."
    return BatchError(
        f"batch must be a tree of tensors, NumPy arrays, numbers or strings. Received: {where} is {kind}. {advice}"
    )


def to_dense(gradient: Any, like: Any) -> Any:
    """Return a gradient as a dense tensor. `tf.IndexedSlices`, the gradient of an embedding lookup, are summed by row
    in at least float32 (S4)."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    values = gradient.values
    if is_floating(values):
        values = tf.cast(values, at_least_float32(values.dtype))
    return tf.math.unsorted_segment_sum(values, gradient.indices, like.shape[0])


def to_dense_float32(gradient: Any, variable: Any) -> Any:
    """Return a variable's gradient as a dense tensor of at least float32.

    Raises:
        GradientError: the gradient is not floating.
    """
    if not is_floating(gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient):
        raise GradientError(
            f"gradients must be floating tensors. Received: {gradient!r} for {variable_name(variable)}."
        )
    value = to_dense(gradient, variable)
    return tf.cast(value, at_least_float32(value.dtype))

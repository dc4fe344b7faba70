"""TensorFlow arrays: conversion to and from TensorFlow. Casts (S2) and the array namespace are in `polyamp_keras`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from polyamp.errors import BatchError, GradientError, describe_value
from polyamp.rules.batches import host_array
from polyamp_keras.arrays import is_floating, leaves_with_paths, native_variable, variable_name
from polyamp_keras.engines.tensorflow import to_dense

Array = np.ndarray[Any, Any]


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


def scalar(value: float, dtype: str, *, like: Any = None) -> Any:
    """Return a new scalar tensor on the device of `like`, or on the default device."""
    device = getattr(native_variable(like), "device", None)
    with tf.device(device):
        return tf.constant(value, dtype)


def to_numpy(array: Any) -> Array:
    """Return a copy as a NumPy array; bfloat16 becomes `ml_dtypes.bfloat16`."""
    return np.array(tf.convert_to_tensor(native_variable(array)).numpy())


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

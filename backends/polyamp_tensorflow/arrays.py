"""TensorFlow arrays: the namespace for polyamp's formulas, casts (S2), and the ways in and out of TensorFlow.

Called by every other module of this package.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import keras
import numpy as np
import tensorflow as tf

from polyamp.arrays import ArrayNamespace
from polyamp.errors import BatchError, GradientError, described
from polyamp.rules.batches import host_array
from polyamp.rules.refusals import FLOATING

Array = np.ndarray[Any, Any]


class TensorFlowNamespace:
    """`ArrayNamespace` over tensors, eager and inside a `tf.function`."""

    def where(self, condition: Any, x: Any, y: Any, /) -> Any:
        return tf.where(condition, x, y)

    def minimum(self, x: Any, y: Any, /) -> Any:
        return tf.minimum(x, y)

    def maximum(self, x: Any, y: Any, /) -> Any:
        return tf.maximum(x, y)

    def asarray(self, value: Any, like: Any, /) -> Any:
        return tf.cast(value, like.dtype) if tf.is_tensor(value) else tf.constant(value, like.dtype)

    def sqrt(self, x: Any, /) -> Any:
        return tf.sqrt(x)

    def sign(self, x: Any, /) -> Any:
        return tf.sign(x)

    def cos(self, x: Any, /) -> Any:
        return tf.cos(x)

    def floor(self, x: Any, /) -> Any:
        return tf.floor(x)

    def power(self, x: Any, y: Any, /) -> Any:
        return tf.pow(x, y)

    def expm1(self, x: Any, /) -> Any:
        return tf.math.expm1(x)


XP: Final[ArrayNamespace] = TensorFlowNamespace()


def dtype_name(array: Any) -> str:
    """The canonical name of an array's dtype: "float32", also for Keras variables and NumPy arrays."""
    return str(tf.as_dtype(array.dtype).name)


def raw(variable: Any) -> Any:
    """The `tf.Variable` inside a Keras variable, or the `tf.Variable` that was given."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def variable_name(variable: Any) -> str:
    """A variable's path; a `tf.Variable` has a name only."""
    return str(getattr(variable, "path", variable.name))


def write(variables: Iterable[Any], values: Iterable[Any]) -> None:
    """Assign each value to its variable."""
    for variable, value in zip(variables, values, strict=True):
        raw(variable).assign(value)


def at_least_float32(dtype: Any) -> Any:
    """The dtype in which gradients and slots are held: float64 stays, anything else becomes float32."""
    return tf.float64 if tf.as_dtype(dtype) == tf.float64 else tf.float32


def is_array(leaf: Any) -> bool:
    """True for tensors, variables and NumPy arrays."""
    return isinstance(leaf, keras.Variable | np.ndarray | np.generic) or bool(tf.is_tensor(leaf))


def is_floating(leaf: Any) -> bool:
    """True for an array of real floating numbers (S2)."""
    return is_array(leaf) and str(getattr(leaf.dtype, "name", leaf.dtype)) in FLOATING


def cast(tree: Any, dtype: str, *, float64: bool = False) -> Any:
    """The tree with its floating leaves in `dtype`; NumPy leaves stay NumPy, everything else is untouched (S2)."""

    def one(leaf: Any) -> Any:
        if not is_floating(leaf) or (dtype_name(leaf) == "float64" and not float64):
            return leaf
        if isinstance(leaf, np.ndarray | np.generic):
            return np.asarray(leaf).astype(tf.as_dtype(dtype).as_numpy_dtype)
        return tf.cast(raw(leaf), dtype)

    return keras.tree.map_structure(one, tree)


def scalar(value: float, dtype: str, *, like: Any = None) -> Any:
    """A new 0-dim tensor, on the device of `like` or on the default one."""
    device = getattr(raw(like), "device", None)
    with tf.device(device):
        return tf.constant(value, dtype)


def to_numpy(array: Any) -> Array:
    """A copy on the host; bfloat16 arrives as `ml_dtypes.bfloat16`."""
    return np.array(tf.convert_to_tensor(raw(array)).numpy())


def leaves(tree: Any) -> list[tuple[str, Any]]:
    """(path, leaf) of every leaf that is not None; a path reads as it would be indexed: "['x'][0]"."""
    return [
        ("".join(f"[{part!r}]" for part in path), leaf)
        for path, leaf in keras.tree.flatten_with_path(tree)
        if leaf is not None
    ]


def to_tensors(tree: Any, parameters: str = "float64") -> Any:
    """A batch as tensors, Python scalars included, so that a new value is never a new trace. What a distributed dataset
    yields stays as it is.

    Args:
        tree: the batch, or gradients.
        parameters: the policy's `param` dtype, which decides what becomes of NumPy's float64 in a batch (S26).

    Raises:
        BatchError: a leaf that TensorFlow cannot hold.
    """

    def one(leaf: Any) -> Any:
        if isinstance(leaf, tf.Variable):
            return tf.convert_to_tensor(leaf)
        if leaf is None or tf.is_tensor(leaf) or isinstance(leaf, tf.distribute.DistributedValues):
            return leaf
        if isinstance(leaf, np.ndarray | np.generic):
            leaf = host_array(leaf, parameters)
        try:
            return tf.convert_to_tensor(raw(leaf))
        except (TypeError, ValueError) as error:
            raise _no_leaf(tree, leaf) from error

    return keras.tree.map_structure(one, tree)


def _no_leaf(batch: Any, leaf: Any) -> BatchError:
    """The error for a leaf that TensorFlow cannot hold."""
    paths = [path for path, other in leaves(batch) if other is leaf]
    where = f"batch{paths[0] if paths else ''}"
    said, advice = described(leaf), f"Take it out of the batch, or convert it to numbers ({where})."
    if isinstance(leaf, np.ndarray):
        said = "a NumPy array of Python objects, as it is made of rows of different length or of None"
        advice = "Pad the rows to one length, and give a mask; or use a tf.RaggedTensor."
    elif hasattr(type(leaf), "__dataclass_fields__"):
        said, advice = f"{said}, a dataclass", "Use a dict, a tuple or a NamedTuple: dataclasses.asdict(batch)."
    return BatchError(
        f"batch must be a tree of tensors, NumPy arrays, numbers or strings. Received: {where} is {said}. {advice}"
    )


def dense(gradient: Any, like: Any) -> Any:
    """A gradient as a dense tensor; `tf.IndexedSlices`, as an embedding's lookup gives them, are summed by row, in at
    least float32 (S4)."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    values = gradient.values
    if is_floating(values):
        values = tf.cast(values, at_least_float32(values.dtype))
    return tf.math.unsorted_segment_sum(values, gradient.indices, like.shape[0])


def dense_wide(gradient: Any, variable: Any) -> Any:
    """A variable's gradient as a dense tensor of at least float32.

    Raises:
        GradientError: it is not floating.
    """
    if not is_floating(gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient):
        raise GradientError(
            f"gradients must be floating tensors. Received: {gradient!r} for {variable_name(variable)}."
        )
    value = dense(gradient, variable)
    return tf.cast(value, at_least_float32(value.dtype))

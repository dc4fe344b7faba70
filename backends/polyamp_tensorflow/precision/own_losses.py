"""Losses that a layer computes in its own call are computed in float32 (S4), or refused by name.

TensorFlow runs a layer's own code in the dtype of its operands, and a sum of 16-bit numbers that is widened afterwards
has three digits. So a layer whose code calls `add_loss` computes in float32 as a whole. What reaches `add_loss` in 16
bits all the same, and a scalar in 16 bits that a model's call returns, are errors that name the layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import keras
import tensorflow as tf

from polyamp.errors import LossError
from polyamp.rules.plan import NARROW
from polyamp_tensorflow.arrays import cast, dtype_name
from polyamp_tensorflow.compat import is_kerass
from polyamp_tensorflow.precision.bound import is_rounded
from polyamp_tensorflow.precision.regularizers import sums_by_itself
from polyamp_tensorflow.precision.stand_ins import signature_of


def adds_losses(layer: Any) -> bool:
    """True for a layer of the user's with a method that calls `add_loss`."""
    own = [cls for cls in type(layer).__mro__ if not is_kerass(cls) and issubclass(cls, keras.Layer)]
    return any("add_loss" in code.co_names for cls in own for method in vars(cls).values() for code in _codes(method))


def refusing_narrow(add_loss: Callable[..., Any], layer: Any, path: str) -> Callable[..., Any]:
    """A layer's `add_loss` that refuses what was computed in 16 bits, and takes the rest in float32.

    Raises (when it is called):
        LossError: names the layer and says what to write.
    """

    def adding(loss: Any) -> Any:
        for leaf in keras.tree.flatten(loss):
            if tf.is_tensor(leaf) and dtype_name(leaf) in NARROW and not sums_by_itself(layer):
                raise LossError(
                    f"{_called(layer, path)} adds a loss in {dtype_name(leaf)}: what was summed in 16 bits has three "
                    "digits, and losses are computed in float32 (S4). Cast what the loss is made of, as in "
                    "keras.ops.mean(keras.ops.square(keras.ops.cast(x, 'float32')))"
                    f"{_or_keep(path)}."
                )
        return add_loss(cast(loss, "float32"))

    return signature_of(add_loss, adding)


def check_scalars(layer: Any, path: str, results: Any) -> None:
    """Refuse a scalar that a call of a layer returns in 16 bits: it is a loss, or a sum all the same.

    Raises:
        LossError: names the layer and says what to write.
    """
    for leaf in keras.tree.flatten(results):
        if tf.is_tensor(leaf) and leaf.shape.rank == 0 and dtype_name(leaf) in NARROW and not is_rounded(leaf):
            raise LossError(
                f"{_called(layer, path)} returns a scalar in {dtype_name(leaf)}: if it is a loss, it was computed in "
                "16 bits and has three digits, and losses are computed in float32 (S4). Cast what it is made of, as in "
                "keras.ops.mean(keras.ops.square(keras.ops.cast(x, 'float32')))"
                f"{_or_keep(path)}."
            )


def _called(layer: Any, path: str) -> str:
    return f"layer {path!r} ({type(layer).__name__})" if path else f"model {layer.name!r} ({type(layer).__name__})"


def _or_keep(path: str) -> str:
    return f", or keep the layer in float32: Policy(..., overrides={{{path!r}: 'float32'}})" if path else ""


def _codes(method: Any) -> Iterator[CodeType]:
    """The code of a method, decorated ones included, and of the functions inside."""
    method = getattr(method, "python_function", method)  # a `tf.function`
    function = inspect.unwrap(getattr(method, "__func__", method)) if callable(method) else None
    waiting = [code] if isinstance(code := getattr(function, "__code__", None), CodeType) else []
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]

"""Float32 rule (S4) for the losses of a layer: those of its own `call`, and its activity regularizer.

TensorFlow runs a layer's own code in the dtype of its operands, and a sum in 16 bits has only three digits, even if it
is cast afterwards. So a layer whose code calls `add_loss` computes entirely in float32. A 16-bit loss that still
reaches `add_loss`, or a 16-bit scalar that a model's call returns, is an error that names the layer.

Keras calls a layer's activity regularizer with the layer's result. In 16 bits the sum is inf above 65504 or loses
digits, and `fit` fails to add it to its float32 loss. So while a policy is applied to a layer, a `Float32Regularizer`
replaces its regularizer.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import keras

from polyamp.errors import LossError
from polyamp.float_formats import HALF_DTYPES
from polyamp_keras.arrays import cast, dtype_name
from polyamp_keras.compat import is_keras_code
from polyamp_keras.precision.layer_method_wrappers import copy_signature
from polyamp_keras.precision.output_casts import cast_output, is_rounded

_REGULARIZER_CACHE: weakref.WeakValueDictionary[int, Float32Regularizer] = weakref.WeakValueDictionary()


class Float32Regularizer:
    """Proxy of a regularizer that calls it with its layer's result in float32, unrounded.

    Class, attributes, equality and copies are those of the wrapped regularizer, as with a `weakref.proxy`. So Keras
    saves and clones a layer with the user's regularizer.
    """

    __slots__ = ("__weakref__", "_wrapped")

    def __init__(self, regularizer: Any) -> None:
        object.__setattr__(self, "_wrapped", regularizer)

    def __call__(self, x: Any) -> Any:
        return _wrapped_regularizer(self)(cast_output(x, "float32", float64=False))

    def __getattribute__(self, name: str) -> Any:
        if name in ("__reduce__", "__reduce_ex__"):
            return lambda *_: (_return_regularizer, (_wrapped_regularizer(self),))
        return getattr(_wrapped_regularizer(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_wrapped_regularizer(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_wrapped_regularizer(self), name)

    def __eq__(self, other: object) -> bool:
        return bool(_wrapped_regularizer(self) == original_regularizer(other))

    def __hash__(self) -> int:
        return hash(_wrapped_regularizer(self))

    def __repr__(self) -> str:
        return repr(_wrapped_regularizer(self))


def float32_regularizer(regularizer: Any) -> Any:
    """Return the float32 proxy of a regularizer. It is cached, so that layers that share a regularizer still do."""
    if regularizer is None or type(regularizer) is Float32Regularizer:
        return regularizer
    known = _REGULARIZER_CACHE.get(id(regularizer))
    if known is None:
        known = _REGULARIZER_CACHE[id(regularizer)] = Float32Regularizer(regularizer)
    return known


def original_regularizer(regularizer: Any) -> Any:
    """Return the user's regularizer, without the proxy."""
    return _wrapped_regularizer(regularizer) if type(regularizer) is Float32Regularizer else regularizer


def _has_own_regularizer(layer: Any) -> bool:
    """Return whether a layer's activity regularizer was set under a policy; it then gets the layer's own dtype."""
    regularizer = getattr(layer, "activity_regularizer", None)
    return regularizer is not None and type(regularizer) is not Float32Regularizer


def _wrapped_regularizer(regularizer: Any) -> Any:
    return object.__getattribute__(regularizer, "_wrapped")


def _return_regularizer(regularizer: Any) -> Any:
    return regularizer


def has_add_loss_call(layer: Any) -> bool:
    """Return whether a layer of the user has a method that calls `add_loss`."""
    own = [cls for cls in type(layer).__mro__ if not is_keras_code(cls) and issubclass(cls, keras.Layer)]
    return any(
        "add_loss" in code.co_names for cls in own for method in vars(cls).values() for code in _code_objects(method)
    )


def refuse_narrow_losses(add_loss: Callable[..., Any], layer: Any, path: str) -> Callable[..., Any]:
    """Return a layer's `add_loss`, wrapped to raise for a loss in 16 bits and to cast others to float32.

    Raises (when it is called):
        LossError: names the layer and the remedy.
    """

    def checked_add_loss(loss: Any) -> Any:
        for leaf in keras.tree.flatten(loss):
            if keras.ops.is_tensor(leaf) and dtype_name(leaf) in HALF_DTYPES and not _has_own_regularizer(layer):
                raise LossError(
                    f"{_describe_layer(layer, path)} adds a loss in {dtype_name(leaf)}: what was summed in 16 bits has "
                    "three digits, and losses are computed in float32 (S4). Cast what the loss is made of, as in "
                    "keras.ops.mean(keras.ops.square(keras.ops.cast(x, 'float32')))"
                    f"{_override_hint(path)}."
                )
        return add_loss(cast(loss, "float32"))

    return copy_signature(add_loss, checked_add_loss)


def check_scalar_results(layer: Any, path: str, results: Any) -> None:
    """Raise if a call of a layer returns a 16-bit scalar, since that is a loss or another sum.

    Raises:
        LossError: names the layer and the remedy.
    """
    for leaf in keras.tree.flatten(results):
        if (
            keras.ops.is_tensor(leaf)
            and len(leaf.shape) == 0
            and dtype_name(leaf) in HALF_DTYPES
            and not is_rounded(leaf)
        ):
            raise LossError(
                f"{_describe_layer(layer, path)} returns a scalar in {dtype_name(leaf)}: if it is a loss, it was "
                "computed in 16 bits and has three digits, and losses are computed in float32 (S4). Cast what it is "
                "made of, as in "
                "keras.ops.mean(keras.ops.square(keras.ops.cast(x, 'float32')))"
                f"{_override_hint(path)}."
            )


def _describe_layer(layer: Any, path: str) -> str:
    return f"layer {path!r} ({type(layer).__name__})" if path else f"model {layer.name!r} ({type(layer).__name__})"


def _override_hint(path: str) -> str:
    return f", or keep the layer in float32: Policy(..., overrides={{{path!r}: 'float32'}})" if path else ""


def _code_objects(method: Any) -> Iterator[CodeType]:
    """Yield the code objects of a method, also a decorated one, and of the functions inside it."""
    method = getattr(method, "python_function", method)  # a `tf.function`
    function = inspect.unwrap(getattr(method, "__func__", method)) if callable(method) else None
    waiting = [code] if isinstance(code := getattr(function, "__code__", None), CodeType) else []
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]

"""Activity regularizers that sum in float32 (S4), independent of their layer's compute dtype.

Keras calls a layer's activity regularizer with the layer's result. In 16 bits the sum is inf above 65504 or loses
digits, and `fit` fails to add it to its float32 loss. So while a policy is applied to a layer, a `Float32Regularizer`
replaces its regularizer.
"""

from __future__ import annotations

import weakref
from typing import Any

from polyamp_tensorflow.precision.policy_module import cast_output

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


def has_own_regularizer(layer: Any) -> bool:
    """Return whether a layer's activity regularizer was set under a policy; it then gets the layer's own dtype."""
    regularizer = getattr(layer, "activity_regularizer", None)
    return regularizer is not None and type(regularizer) is not Float32Regularizer


def _wrapped_regularizer(regularizer: Any) -> Any:
    return object.__getattribute__(regularizer, "_wrapped")


def _return_regularizer(regularizer: Any) -> Any:
    return regularizer

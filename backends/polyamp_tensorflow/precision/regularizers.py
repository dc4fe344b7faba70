"""Activity regularizers that sum in float32 (S4), whatever their layer computes in.

Keras hands a layer's activity regularizer the layer's result. In 16 bits the sum is inf above 65504 or loses digits,
and `fit` fails where it adds the sum to its float32 loss. So while a policy is on a layer, a `Float32Regularizer` is in
the place of its regularizer. Called by `layer_stack`.
"""

from __future__ import annotations

import weakref
from typing import Any

from polyamp_tensorflow.precision.bound import as_output

_KNOWN: weakref.WeakValueDictionary[int, Float32Regularizer] = weakref.WeakValueDictionary()


class Float32Regularizer:
    """A regularizer that is called with its layer's result in float32, from before it was rounded to 16 bits.

    In everything else it is the one inside, as a `weakref.proxy` is: its class, attributes, equality and copies. So
    Keras saves and clones a layer with what the user gave it.
    """

    __slots__ = ("__weakref__", "_inside")

    def __init__(self, inside: Any) -> None:
        object.__setattr__(self, "_inside", inside)

    def __call__(self, x: Any) -> Any:
        return _inside(self)(as_output(x, "float32", float64=False))

    def __getattribute__(self, name: str) -> Any:
        if name in ("__reduce__", "__reduce_ex__"):
            return lambda *_: (_itself, (_inside(self),))
        return getattr(_inside(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_inside(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_inside(self), name)

    def __eq__(self, other: object) -> bool:
        return bool(_inside(self) == without_float32(other))

    def __hash__(self) -> int:
        return hash(_inside(self))

    def __repr__(self) -> str:
        return repr(_inside(self))


def in_float32(regularizer: Any) -> Any:
    """A regularizer that sums in float32; the same one for the same regularizer, so that layers go on sharing it."""
    if regularizer is None or type(regularizer) is Float32Regularizer:
        return regularizer
    known = _KNOWN.get(id(regularizer))
    if known is None:
        known = _KNOWN[id(regularizer)] = Float32Regularizer(regularizer)
    return known


def without_float32(regularizer: Any) -> Any:
    """The regularizer as the user gave it."""
    return _inside(regularizer) if type(regularizer) is Float32Regularizer else regularizer


def sums_by_itself(layer: Any) -> bool:
    """True for a layer whose activity regularizer was set while a policy is on it: it sees the layer's own dtype."""
    regularizer = getattr(layer, "activity_regularizer", None)
    return regularizer is not None and type(regularizer) is not Float32Regularizer


def _inside(regularizer: Any) -> Any:
    return object.__getattribute__(regularizer, "_inside")


def _itself(regularizer: Any) -> Any:
    return regularizer

"""The error for an operation in a layer's own code whose operands differ in dtype, which TensorFlow does not promote.

It is recognised by TensorFlow's words, in 2.19 to 2.21.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import tensorflow as tf

from polyamp.errors import ModelError, PolyampError
from polyamp_tensorflow.precision.stand_ins import signature_of

_NAMES: Final = {"half": "float16", "float": "float32", "double": "float64"}
_DTYPE: Final = r"\b(float16|bfloat16|float32|float64|half|float|double)\b"
_SAID: Final = r"[^\n]*(?:does not match type|was expected to be a|requested dtype)[^\n]*"
_RAISED: Final = (TypeError, ValueError, tf.errors.InvalidArgumentError)


def mixed_dtypes(error: Exception, layer: Any, path: str) -> ModelError | None:
    """The error to raise in place of TensorFlow's; None for one that says something else.

    Args:
        error: what was raised in the layer's call.
        layer: the innermost layer whose call it was.
        path: where the layer lies in the model; "" for the model itself, or where it is not known.
    """
    if not isinstance(error, _RAISED) or isinstance(error, PolyampError):
        return None
    said = next(iter(re.findall(_SAID, str(error))), "")
    found = list(dict.fromkeys(_NAMES.get(name, name) for name in re.findall(_DTYPE, said)))
    if len(found) < 2:
        return None
    narrow = min(found, key=lambda name: tf.as_dtype(name).size)
    wide = max(found, key=lambda name: tf.as_dtype(name).size)
    keep = (
        f"Keep the layer in {wide}: Policy(..., overrides={{{path!r}: {wide!r}}}). Or"
        if path
        else "In the model's call,"
    )
    return ModelError(
        f"layer {path or layer.name!r} ({type(layer).__name__}) computes with operands of {narrow} and {wide}, which "
        f"TensorFlow does not do. Its input is {narrow} under the policy, and its own call makes the other: "
        "random numbers "
        f"and constants are {wide} unless they are told otherwise. {keep} make both of one dtype, as in "
        "tf.random.normal(tf.shape(z), dtype=z.dtype) or tf.cast(noise, z.dtype)."
    )


def naming_mixed_dtypes(call: Callable[..., Any], layer: Any, path: str) -> Callable[..., Any]:
    """`call` of a layer with code of the user's, which raises that error wherever it is called from."""

    def naming(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except _RAISED as error:
            named = mixed_dtypes(error, layer, path)
            if named is None:
                raise
            raise named from error

    return signature_of(call, naming)

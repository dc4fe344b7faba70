"""Error for operands of different dtypes in a layer's own code, which TensorFlow does not promote.

It is recognised by the text of TensorFlow's error, in 2.19 to 2.21.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import tensorflow as tf

from polyamp.errors import ModelError, PolyampError
from polyamp_tensorflow.precision.tensorflow_only.layer_method_wrappers import copy_signature

_CANONICAL_DTYPES: Final = {"half": "float16", "float": "float32", "double": "float64"}
_DTYPE_PATTERN: Final = r"\b(float16|bfloat16|float32|float64|half|float|double)\b"
_MESSAGE_PATTERN: Final = r"[^\n]*(?:does not match type|was expected to be a|requested dtype)[^\n]*"
_ERROR_TYPES: Final = (TypeError, ValueError, tf.errors.InvalidArgumentError)


def mixed_dtype_error(error: Exception, layer: Any, path: str) -> ModelError | None:
    """Return the error to raise in place of TensorFlow's; None if the error is about something else.

    Args:
        error: the error from the layer's call.
        layer: the innermost layer whose call raised it.
        path: path of the layer in the model; "" for the model itself, or if unknown.
    """
    if not isinstance(error, _ERROR_TYPES) or isinstance(error, PolyampError):
        return None
    message = next(iter(re.findall(_MESSAGE_PATTERN, str(error))), "")
    dtypes = list(dict.fromkeys(_CANONICAL_DTYPES.get(name, name) for name in re.findall(_DTYPE_PATTERN, message)))
    if len(dtypes) < 2:
        return None
    narrow = min(dtypes, key=lambda name: tf.as_dtype(name).size)
    wide = max(dtypes, key=lambda name: tf.as_dtype(name).size)
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


def raise_mixed_dtype_errors(call: Callable[..., Any], layer: Any, path: str) -> Callable[..., Any]:
    """Return `call` of a layer with the user's code, wrapped to raise that error."""

    def call_and_explain(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except _ERROR_TYPES as error:
            explained = mixed_dtype_error(error, layer, path)
            if explained is None:
                raise
            raise explained from error

    return copy_signature(call, call_and_explain)

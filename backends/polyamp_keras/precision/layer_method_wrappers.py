"""Replacements of a layer's methods while a policy is applied, for what a Keras policy cannot express.

TensorFlow does not promote operands of different dtypes in a layer's own code, and torch not in products: that error is
recognised by its text, in TensorFlow 2.19 to 2.21 and torch 2.7 to 2.13, and explained.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, Final

import keras

from polyamp.errors import ModelError, PolyampError
from polyamp.float_formats import FORMATS, HALF_DTYPES
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_keras.arrays import cast, dtype_name
from polyamp_keras.compat import is_outermost
from polyamp_keras.engine import ENGINE
from polyamp_keras.precision.output_casts import LOSSES_READ, cast_output, round_to_dtype

FLOAT8_CALL: Final = "_polyamp_float8_call"
"""Attribute of a layer: its own `call` with its product in 8 bits (S36), while a policy is applied."""
_CANONICAL_DTYPES: Final = {"half": "float16", "float": "float32", "double": "float64"}
_DTYPE_PATTERN: Final = rf"\b({'|'.join((*FORMATS, *_CANONICAL_DTYPES))})\b"
_BYTES: Final = {name: form.bytes for name, form in FORMATS.items()}


def copy_signature(method: Callable[..., Any], stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """Give `stand_in` the name, documentation and signature of the method that it replaces. Keras checks
    `inspect.signature(layer.call)` for `training` and `mask`."""
    functools.update_wrapper(stand_in, method)
    del stand_in.__wrapped__  # type: ignore[attr-defined]  # or AutoGraph would bypass the stand-in
    function = getattr(method, "python_function", method)  # a `tf.function` itself has no signature
    stand_in.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # functions take any attribute
    return stand_in


def late_call(layer: Any) -> Callable[..., Any]:
    """Return a layer's `call` for a stand-in that is put on before a policy: it has the policy's products in 8 bits,
    which replace the layer's own `call`, below the stand-in."""
    call: Callable[..., Any] = layer.call
    if FLOAT8_CALL in vars(layer):
        return call
    return copy_signature(call, lambda *args, **kwargs: vars(layer).get(FLOAT8_CALL, call)(*args, **kwargs))


def round_result(call: Callable[..., Any], dtype: str) -> Callable[..., Any]:
    """Return `call` with its result rounded to `dtype`; `cast_output` can still find the unrounded result."""
    return copy_signature(call, lambda *args, **kwargs: round_to_dtype(call(*args, **kwargs), dtype))


def cast_inputs(call: Callable[..., Any], dtype: str) -> Callable[..., Any]:
    """Return `call` with its floating arguments cast to `dtype`."""
    return copy_signature(call, lambda *args, **kwargs: call(*cast(args, dtype), **cast(kwargs, dtype)))


def cast_result_to_output(
    call: Callable[..., Any],
    plan: ResolvedPolicy,
    check: Callable[[Any], None] | None,
    applies: Callable[[], bool] = lambda: True,
) -> Callable[..., Any]:
    """Return `call` with its result cast to the policy's output dtype (S1).

    Args:
        call: the `call` of the model or a layer.
        plan: the policy.
        check: called with the result before the cast; or None.
        applies: returns whether the result of the current call is cast.
    """

    def call_and_cast(*args: Any, **kwargs: Any) -> Any:
        results = call(*args, **kwargs)
        if not applies():
            return results
        if check is not None:
            check(results)
        return cast_output(results, plan.output, float64=plan.float64)

    return copy_signature(call, call_and_cast)


def is_call_for_loss(layer: Any, *, in_fit: bool) -> bool:
    """Return whether the user's code calls a layer of the model directly, to compute a loss from its result (S29).

    Args:
        layer: the layer.
        in_fit: True for every outermost call; False for outermost calls in `loss_fn`.
    """
    return (in_fit or LOSSES_READ.get() is not None) and is_outermost(layer)


def apply_scores(layer: Any, scores: Any, value: Any, scores_mask: Any = None, training: bool = False) -> Any:
    """`keras.layers.Attention._apply_scores` with the softmax in float32 and the product in the scores' dtype (S4)."""
    wide = keras.ops.cast(scores, "float32")
    if scores_mask is not None:
        mask = scores_mask if len(scores_mask.shape) > 2 else keras.ops.expand_dims(scores_mask, axis=-2)
        wide = keras.ops.where(mask, wide, wide - 1e9)
    weights = keras.ops.cast(keras.ops.softmax(wide, axis=-1), value.dtype)
    if training and layer.dropout > 0:
        weights = keras.random.dropout(weights, layer.dropout, seed=layer.seed_generator)
    return keras.ops.matmul(weights, value), weights


def sum_gather_gradient_in_float32(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a gather of 16-bit numbers whose gradient is summed in float32 and rounded once."""

    def gather_or_call(x: Any, *args: Any, **kwargs: Any) -> Any:
        if not ENGINE.is_tensor(x) or dtype_name(x) not in HALF_DTYPES:
            return call(x, *args, **kwargs)
        return ENGINE.gather_in_float32(call, x, args, kwargs)

    return copy_signature(call, gather_or_call)


def mixed_dtype_error(error: Exception, layer: Any, path: str) -> ModelError | None:
    """Return the error to raise in place of the framework's; None if the error is about something else.

    Args:
        error: the error from the layer's call.
        layer: the innermost layer whose call raised it.
        path: path of the layer in the model; "" for the model itself, or if unknown.
    """
    if not isinstance(error, ENGINE.DTYPE_ERRORS) or isinstance(error, PolyampError):
        return None
    message = next(iter(re.findall(ENGINE.DTYPE_MESSAGE, str(error))), "")
    dtypes = list(
        dict.fromkeys(_CANONICAL_DTYPES.get(name, name) for name in re.findall(_DTYPE_PATTERN, message.lower()))
    )
    if len(dtypes) < 2:
        return None
    narrow = min(dtypes, key=_BYTES.__getitem__)
    wide = max(dtypes, key=_BYTES.__getitem__)
    keep = (
        f"Keep the layer in {wide}: Policy(..., overrides={{{path!r}: {wide!r}}}). Or"
        if path
        else "In the model's call,"
    )
    return ModelError(
        f"layer {path or layer.name!r} ({type(layer).__name__}) computes with operands of {narrow} and {wide}, which "
        f"{ENGINE.FRAMEWORK} does not do. Its input is {narrow} under the policy, and its own call makes the other: "
        "random numbers "
        f"and constants are {wide} unless they are told otherwise. {keep} make both of one dtype, as in "
        f"{ENGINE.ONE_DTYPE_CODE}."
    )


def raise_mixed_dtype_errors(call: Callable[..., Any], layer: Any, path: str) -> Callable[..., Any]:
    """Return `call` of a layer with the user's code, wrapped to raise that error."""

    def call_and_explain(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except ENGINE.DTYPE_ERRORS as error:
            explained = mixed_dtype_error(error, layer, path)
            if explained is None:
                raise
            raise explained from error

    return copy_signature(call, call_and_explain)

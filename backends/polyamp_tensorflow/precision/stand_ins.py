"""Functions that stand in for a layer's methods while a policy is on it, for what its Keras policy cannot say.

Called by `layer_stack`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from polyamp.rules.plan import Plan
from polyamp_tensorflow.arrays import cast
from polyamp_tensorflow.compat import is_outermost
from polyamp_tensorflow.precision.bound import ASKED, as_output, in_dtype


def signature_of(method: Callable[..., Any], stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """`stand_in` with the name, documentation and signature of the method whose place it takes: code asks
    `inspect.signature(layer.call)` whether a layer takes `training` or `mask`."""
    functools.update_wrapper(stand_in, method)
    del stand_in.__wrapped__  # type: ignore[attr-defined]  # or AutoGraph would go past the stand-in
    function = getattr(method, "python_function", method)  # a `tf.function` itself shows none
    stand_in.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # functions take any attribute
    return stand_in


def rounding(call: Callable[..., Any], dtype: str) -> Callable[..., Any]:
    """`call` with its result in `dtype`, from which `as_output` finds back to what was not rounded."""
    return signature_of(call, lambda *args, **kwargs: in_dtype(call(*args, **kwargs), dtype))


def casting_inputs(call: Callable[..., Any], dtype: str) -> Callable[..., Any]:
    """`call` with its floating arguments in `dtype`."""
    return signature_of(call, lambda *args, **kwargs: call(*cast(args, dtype), **cast(kwargs, dtype)))


def giving_output(call: Callable[..., Any], plan: Plan, check: Callable[[Any], None]) -> Callable[..., Any]:
    """`call` with its result, which `check` sees first, in the dtype of the policy's outputs (S1)."""

    def giving(*args: Any, **kwargs: Any) -> Any:
        results = call(*args, **kwargs)
        check(results)
        return as_output(results, plan.output, float64=plan.float64)

    return signature_of(call, giving)


def giving_output_to_losses(
    call: Callable[..., Any], layer: Any, plan: Plan, check: Callable[[Any], None], *, always: bool
) -> Callable[..., Any]:
    """`call` of a layer inside the model, with its result in the dtype of the policy's outputs where the program calls
    the layer by itself, to compute a loss of what it gives (S29).

    Args:
        call: the layer's.
        layer: the layer.
        plan: the policy.
        check: sees such a result first.
        always: wherever no call of another layer is around it; otherwise in `loss_fn` alone.
    """

    def giving(*args: Any, **kwargs: Any) -> Any:
        results = call(*args, **kwargs)
        if not ((always or ASKED.get() is not None) and is_outermost(layer)):
            return results
        check(results)
        return as_output(results, plan.output, float64=plan.float64)

    return signature_of(call, giving)


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


def summed_in_float32(call: Callable[..., Any]) -> Callable[..., Any]:
    """A gather of 16-bit numbers whose gradient is added up in float32 and rounded once."""

    def gathering(x: Any, *args: Any, **kwargs: Any) -> Any:
        if not tf.is_tensor(x) or x.dtype not in (tf.float16, tf.bfloat16):
            return call(x, *args, **kwargs)

        @tf.custom_gradient  # type: ignore[untyped-decorator]  # TensorFlow is untyped
        def gathered(x: Any) -> Any:
            def gradient(upstream: Any) -> Any:
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    wide = tf.zeros(tf.shape(x), tf.float32)  # a gather's gradient asks for its shape alone
                    tape.watch(wide)
                    read = call(wide, *args, **kwargs)
                upstream = tf.convert_to_tensor(tf.cast(upstream, tf.float32))
                total = tf.convert_to_tensor(tape.gradient(read, wide, output_gradients=upstream))
                return tf.cast(total, x.dtype)

            return call(x, *args, **kwargs), gradient

        return gathered(x)

    return signature_of(call, gathering)

"""Loss scaling (S6), unscaling (S7), global norm and finite flag (S10, S11)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import keras
import tensorflow as tf

from polyamp.errors import GradientError
from polyamp.rules.step_checks import check_any_gradient, check_loss
from polyamp_keras.arrays import dtype_name, is_floating, native_variable
from polyamp_keras.precision.output_casts import warn_narrow_loss

_SMALLEST: Final = 2.0**-126
"""Smallest normal float32; TensorFlow's kernels flush smaller values to zero."""
_SMALLEST_SUM: Final = 2.0**-60
"""Sum of squares above which flushed squares are negligible, for up to 2**40 of them."""


def scale_loss(loss: Any, scale: Any | None, *, what: str = "scale()") -> Any:
    """Return the scalar loss in float32, times `scale` unless that is None.

    Raises:
        LossError: not a floating scalar.
    """
    loss = tf.convert_to_tensor(native_variable(loss))
    if loss.shape.rank is None:  # as tf.py_function returns it
        loss = tf.ensure_shape(loss, ())
    check_loss(tuple(loss.shape), dtype_name(loss), what=what)
    wide = tf.cast(tf.reshape(loss, ()), tf.float32)
    return wide if scale is None else wide * scale


def scale_custom_loop_loss(loss: Any, scale: Any | None) -> Any:
    """Return the scaled loss of a custom loop, whose policy is unknown. A loss that is not a scalar keeps its shape, as
    in Keras's `scale_loss`. A loss in 16 bits causes a warning, since it was computed in 16 bits.

    Raises:
        LossError: not floating.
    """
    loss, what = tf.convert_to_tensor(native_variable(loss)), "what calls scale_loss()"
    warn_narrow_loss(dtype_name(loss), stacklevel=5)
    if loss.shape.rank in (None, 0) or loss.shape == (1,):
        return scale_loss(loss, scale, what=what)
    check_loss((), dtype_name(loss), what=what)
    wide = tf.cast(loss, tf.float32)
    return wide if scale is None else wide * scale


def unscale(grads: Any, scale: Any | None) -> tuple[Any, Any]:
    """Return the gradients in float32, divided by `scale`, and the finite flag of the quotients. None stays None.

    Raises:
        GradientError: no gradients, or one that is not floating.
    """
    quotients = []

    def unscale_leaf(leaf: Any) -> Any:
        if leaf is None:
            return None
        if not is_floating(leaf):
            raise GradientError(f"gradients must be floating arrays. Received: {leaf!r}.")
        wide = tf.cast(tf.convert_to_tensor(native_variable(leaf)), tf.float32)
        quotients.append(wide if scale is None else wide / scale)
        return quotients[-1]

    unscaled = keras.tree.map_structure(unscale_leaf, grads)
    check_any_gradient(quotients, who="unscale()", then="Pass a list, dict or tree with at least one floating tensor.")
    return unscaled, global_norm_and_finite(quotients)[1]


def global_norm_and_finite(gradients: Sequence[Any]) -> tuple[Any, Any]:
    """Return the global L2 norm, in float64 if a gradient is, else float32; and whether all gradients are finite.

    One pass that sums the squares gives both, unless the sum is not finite or very small. Then the gradients have a
    huge norm, are not finite, or are tiny; a slower computation with a few more passes decides.
    """
    dtype = tf.float64 if any(gradient.dtype == tf.float64 for gradient in gradients) else tf.float32
    wide = [tf.cast(gradient, dtype) for gradient in gradients]
    total = 2.0 * tf.add_n([tf.nn.l2_loss(gradient) for gradient in wide])
    plain = tf.math.is_finite(total) & (total >= _SMALLEST_SUM)
    if tf.executing_eagerly():
        return (tf.sqrt(total), plain) if plain else _norm_by_largest(wide)
    inputs = [total, *wide]
    norm, finite = tf.raw_ops.StatelessIf(
        cond=plain,
        input=inputs,
        Tout=[dtype, tf.bool],
        then_branch=_conditional_branch(lambda total, *_: (tf.sqrt(total), tf.constant(True)), inputs),
        else_branch=_conditional_branch(lambda _, *wide: _norm_by_largest(wide), inputs),
        output_shapes=[(), ()],
    )
    return norm, finite


def _conditional_branch(body: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """Return `body(*inputs)` as a function for `StatelessIf`, which calls it without inlining.

    `tf.cond` inlines its branches, with a switch operation for every gradient: 5 % of the step of a hundred small
    layers. The function has one named argument: TensorFlow warns about names such as `_`, with an exception whose
    traceback keeps the whole program alive as long as a log keeps the warning.
    """
    specs = [tf.TensorSpec(value.shape, value.dtype) for value in inputs]
    return tf.function(lambda inputs: body(*inputs), autograph=False).get_concrete_function(specs)


def _norm_by_largest(gradients: Sequence[Any]) -> tuple[Any, Any]:
    """Return norm and finite flag for any range: divide the gradients by their largest magnitude before squaring.

    So the sum of squares is between 1 and the number of elements, and it is not finite exactly when a gradient is not.
    """
    largest = tf.reduce_max(tf.stack([tf.reduce_max(tf.abs(gradient)) for gradient in gradients]))
    usable = tf.math.is_finite(largest) & (largest >= _SMALLEST)
    unit = tf.where(usable, largest, tf.ones_like(largest))
    total = tf.add_n([tf.reduce_sum(tf.square(gradient / unit)) for gradient in gradients])
    return unit * tf.sqrt(total), tf.math.is_finite(total)

"""The numbers between the loss and the optimizer: loss scaling (S6), unscaling (S7), norm and finite flag (S10, S11).

Called by the step and, through the backend, by `LossScaler.scale` and `LossScaler.unscale`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import keras
import tensorflow as tf

from polyamp.checks import check_loss
from polyamp.errors import GradientError
from polyamp_tensorflow.arrays import dtype_name, is_floating, raw

_SMALLEST: Final = 2.0**-126
"""The smallest normal float32; below it TensorFlow's kernels flush to zero."""


def scale_loss(loss: Any, scale: Any | None, *, what: str = "scale()") -> Any:
    """The scalar loss in float32, times `scale` unless that is None.

    Raises:
        LossError: not a floating scalar.
    """
    loss = tf.convert_to_tensor(raw(loss))
    if loss.shape.rank is None:  # as tf.py_function returns it
        loss = tf.ensure_shape(loss, ())
    check_loss(tuple(loss.shape), dtype_name(loss), what=what)
    wide = tf.cast(tf.reshape(loss, ()), tf.float32)
    return wide if scale is None else wide * scale


def unscale(grads: Any, scale: Any | None) -> tuple[Any, Any]:
    """The tree of gradients in float32, divided by `scale`, and the finite flag over the quotients; None stays None.

    Raises:
        GradientError: no gradients, or one that is not floating.
    """
    quotients = []

    def one(leaf: Any) -> Any:
        if leaf is None:
            return None
        if not is_floating(leaf):
            raise GradientError(f"gradients must be floating arrays. Received: {leaf!r}.")
        wide = tf.cast(tf.convert_to_tensor(raw(leaf)), tf.float32)
        quotients.append(wide if scale is None else wide / scale)
        return quotients[-1]

    unscaled = keras.tree.map_structure(one, grads)
    if not quotients:
        raise GradientError("unscale() got no gradients. Pass a list, dict or tree with at least one floating tensor.")
    return unscaled, norm_and_flag(quotients)[1]


def norm_and_flag(gradients: Sequence[Any]) -> tuple[Any, Any]:
    """Global L2 norm in float32, and True if every element is finite.

    The gradients are divided by their largest magnitude before they are squared. So the sum of squares lies between 1
    and the number of elements whatever the gradients' range, and it is not finite exactly when one of them is not:
    one reduction serves both.
    """
    wide = [tf.cast(gradient, tf.float32) for gradient in gradients]
    largest = tf.reduce_max(tf.stack([tf.reduce_max(tf.abs(gradient)) for gradient in wide]))
    usable = tf.math.is_finite(largest) & (largest >= _SMALLEST)
    unit = tf.where(usable, largest, tf.ones_like(largest))
    total = tf.add_n([tf.reduce_sum(tf.square(gradient / unit)) for gradient in wide])
    return unit * tf.sqrt(total), tf.math.is_finite(total)

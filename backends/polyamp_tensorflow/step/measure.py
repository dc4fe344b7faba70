"""The numbers between the loss and the optimizer: loss scaling (S6), unscaling (S7), norm and finite flag (S10, S11).

Called by the step and, through the backend, by `LossScaler.scale` and `LossScaler.unscale`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import keras
import tensorflow as tf

from polyamp.errors import GradientError
from polyamp.rules.plan import NARROW
from polyamp.rules.refusals import check_any, check_loss
from polyamp_tensorflow.arrays import dtype_name, is_floating, raw

_SMALLEST: Final = 2.0**-126
"""The smallest normal float32; below it TensorFlow's kernels flush to zero."""
_SMALLEST_SUM: Final = 2.0**-60
"""A sum of squares from here on lost nothing that counts to squares that were flushed, up to 2**40 of them."""


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


def scale_own_loss(loss: Any, scale: Any | None, *, what: str) -> Any:
    """The same for a loop of one's own, whose policy is not known: a loss of another shape keeps it, as in Keras's own
    `scale_loss`, and of one in 16 bits, which was computed in them, a warning says so.

    Raises:
        LossError: not floating.
    """
    loss = tf.convert_to_tensor(raw(loss))
    if dtype_name(loss) in NARROW:
        warnings.warn(
            f"scale_loss() is given a loss in {dtype_name(loss)}: it was computed in 16 bits, where a sum has three "
            "digits. Cast what it is made of, loss = keras.ops.mean(keras.ops.square(keras.ops.cast(x, 'float32'))), "
            "or use a loss object of Keras's or polyamp.losses, which compute in float32.",
            UserWarning,
            stacklevel=4,
        )
    if loss.shape.rank in (None, 0) or loss.shape == (1,):
        return scale_loss(loss, scale, what=what)
    check_loss((), dtype_name(loss), what=what)
    wide = tf.cast(loss, tf.float32)
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
    check_any(quotients, who="unscale()", then="Pass a list, dict or tree with at least one floating tensor.")
    return unscaled, norm_and_flag(quotients)[1]


def norm_and_flag(gradients: Sequence[Any]) -> tuple[Any, Any]:
    """Global L2 norm in float32, or in float64 where a gradient is, and True if every element is finite.

    One pass of squares is both, unless their sum leaves float32's comfortable range: then the gradients are finite
    with a huge norm, or not finite, or tiny, and a second way that costs a few passes more tells.
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
        then_branch=_branch(lambda total, *_: (tf.sqrt(total), tf.constant(True)), inputs),
        else_branch=_branch(lambda _, *wide: _norm_by_largest(wide), inputs),
        output_shapes=[(), ()],
    )
    return norm, finite


def _branch(body: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """`body(*inputs)` as a function for `StatelessIf`, which calls it whole.

    `tf.cond` has its branches inlined, and then every gradient goes through a switch of its own: 5 % of the step of a
    hundred small layers. The function has one named argument: TensorFlow warns of names such as `_`, with an exception
    whose traceback keeps the whole program alive for as long as a log keeps the warning.
    """
    specs = [tf.TensorSpec(value.shape, value.dtype) for value in inputs]
    return tf.function(lambda inputs: body(*inputs), autograph=False).get_concrete_function(specs)


def _norm_by_largest(gradients: Sequence[Any]) -> tuple[Any, Any]:
    """The same for any range: the gradients are divided by their largest magnitude before they are squared.

    So the sum of squares lies between 1 and the number of elements, and it is not finite exactly when one of the
    gradients is not.
    """
    largest = tf.reduce_max(tf.stack([tf.reduce_max(tf.abs(gradient)) for gradient in gradients]))
    usable = tf.math.is_finite(largest) & (largest >= _SMALLEST)
    unit = tf.where(usable, largest, tf.ones_like(largest))
    total = tf.add_n([tf.reduce_sum(tf.square(gradient / unit)) for gradient in gradients])
    return unit * tf.sqrt(total), tf.math.is_finite(total)

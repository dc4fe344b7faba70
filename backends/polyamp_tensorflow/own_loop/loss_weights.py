"""What a loss of Keras's `fit` is a mean over, where that is not the rows: a mask, or sample weights (S8)."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import keras
import tensorflow as tf

from polyamp_tensorflow.compat import mask_of
from polyamp_tensorflow.step import replicas

_BY_WEIGHTS: Final = "mean_with_sample_weight"
_BY_MASK: Final = ("mean", "sum_over_batch_size")


@contextlib.contextmanager
def count_losses(model: Any, note: Callable[[Any], None]) -> Iterator[None]:
    """A block in which `model.compute_loss` hands what it divides by to `note`, if that is not the rows.

    Args:
        model: a compiled model.
        note: takes a float32 scalar, the sum over all replicas.
    """
    cls = type(model)
    if cls.compute_loss is not keras.Model.compute_loss:  # a loss of the user's own, of which nothing is known
        yield
        return

    @functools.wraps(cls.compute_loss)
    def compute_loss(
        x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        count = _count(model, y_pred, sample_weight)
        if count is not None:
            (total,) = replicas.total([tf.cast(count, tf.float32)])
            note(total)
        return cls.compute_loss(model, x, y, y_pred, sample_weight, training)

    model.compute_loss = compute_loss
    try:
        yield
    finally:
        del model.compute_loss


def _count(model: Any, outputs: Any, sample_weight: Any) -> Any:
    """What the compiled loss divides by; None for the rows."""
    loss = model.loss
    structured = isinstance(loss, dict | list | tuple) or isinstance(outputs, dict | list | tuple)
    masks = [mask_of(leaf) for leaf in keras.tree.flatten(outputs)]
    reductions = [getattr(part, "reduction", _BY_MASK[1]) for part in keras.tree.flatten(loss)]
    by_weights = sample_weight is not None and _BY_WEIGHTS in reductions
    if structured:
        if by_weights or any(mask is not None for mask in masks):
            _warn()
        return None
    mask = None if masks[0] is None else tf.cast(masks[0], tf.float32)
    if mask is not None and reductions[0] in _BY_MASK:
        return tf.reduce_sum(mask)
    if not by_weights:
        return None
    weights = tf.cast(sample_weight, tf.float32)
    if mask is None:
        return tf.reduce_sum(weights)
    weights = tf.reshape(weights, [*weights.shape[: mask.shape.rank], *[1] * (mask.shape.rank - weights.shape.rank)])
    return tf.reduce_sum(mask * weights)


@functools.cache
def _warn() -> None:
    """Once in a process."""
    warnings.warn(
        "fit with accumulate_steps: the losses of several outputs have masks, or sample weights that they divide by, "
        "so that no one number says what the sum is over. Micro-batches count by their rows, and an update is not "
        "that of one batch. polyamp.train_step with polyamp.losses.Mean for each output is.",
        UserWarning,
        stacklevel=2,
    )

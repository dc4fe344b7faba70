"""Divisor of a loss in Keras's `fit`, where it is not the number of rows: a mask, an ignored class or sample weights
(S8)."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Final

import keras

from polyamp.context_values import temporary_value
from polyamp_keras.compat import get_keras_mask
from polyamp_keras.models.layers import own_class

_BY_WEIGHTS: Final = "mean_with_sample_weight"
_BY_MASK: Final = ("mean", "sum_over_batch_size")


_DIVISOR_CALLBACK: Final[ContextVar[Callable[[Any], None] | None]] = ContextVar("loss_weight", default=None)
"""Callback that gets the divisor of the current micro-batch's loss; each replica has its own thread and callback."""


def report_loss_divisors(note: Callable[[Any], None]) -> AbstractContextManager[None]:
    """Context manager in which models with `install_loss_counting` pass the divisor of their loss to `note`.

    Args:
        note: called with a float32 scalar, of this replica; not called if the divisor is the number of rows.
    """
    return temporary_value(_DIVISOR_CALLBACK, note)


def install_loss_counting(model: Any) -> None:
    """Make a model's `compute_loss` report its divisor in `report_loss_divisors`. A custom `compute_loss` is unchanged,
    since its divisor is unknown."""
    cls = own_class(model)
    if cls.compute_loss is not keras.Model.compute_loss:
        return

    @functools.wraps(cls.compute_loss)
    def compute_loss(
        x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        note = _DIVISOR_CALLBACK.get()
        count = None if note is None else _loss_divisor(model, y, y_pred, sample_weight)
        if note is not None and count is not None:
            note(keras.ops.cast(count, "float32"))
        return cls.compute_loss(model, x, y, y_pred, sample_weight, training)

    model.compute_loss = compute_loss


def _loss_mask(loss: Any, labels: Any, output: Any) -> Any:
    """Return which elements of an output count in its loss, as in Keras: those in the output's mask whose label is not
    ignored; None for all."""
    mask, ignored = get_keras_mask(output), getattr(loss, "ignore_class", None)
    if ignored is None:
        return None if mask is None else keras.ops.cast(mask, "bool")
    labels = keras.ops.convert_to_tensor(labels)
    if len(labels.shape) == len(output.shape) and labels.shape[-1] == 1:
        labels = keras.ops.squeeze(labels, -1)
    counted = keras.ops.not_equal(labels, keras.ops.cast(ignored, labels.dtype))
    return counted if mask is None else keras.ops.logical_and(keras.ops.cast(mask, "bool"), counted)


def _loss_divisor(model: Any, labels: Any, outputs: Any, sample_weight: Any) -> Any:
    """Return the divisor of the compiled loss; None if it is the number of rows."""
    loss = model.loss
    structured = isinstance(loss, dict | list | tuple) or isinstance(outputs, dict | list | tuple)
    reductions = [getattr(part, "reduction", _BY_MASK[1]) for part in keras.tree.flatten(loss)]
    by_weights = sample_weight is not None and _BY_WEIGHTS in reductions
    if structured:
        ignores = any(getattr(part, "ignore_class", None) is not None for part in keras.tree.flatten(loss))
        if by_weights or ignores or any(get_keras_mask(leaf) is not None for leaf in keras.tree.flatten(outputs)):
            _warn_unknown_divisor()
        return None
    found = _loss_mask(loss, labels, outputs)
    mask = None if found is None else keras.ops.cast(found, "float32")
    if mask is not None and reductions[0] in _BY_MASK:
        return keras.ops.sum(mask)
    if not by_weights:
        return None
    weights = keras.ops.cast(sample_weight, "float32")
    if mask is None:
        return keras.ops.sum(weights)
    weights = keras.ops.reshape(
        weights, [*weights.shape[: len(mask.shape)], *[1] * (len(mask.shape) - len(weights.shape))]
    )
    return keras.ops.sum(mask * weights)


@functools.cache
def _warn_unknown_divisor() -> None:
    """Warn once per process."""
    warnings.warn(
        "fit with accumulate_steps: the losses of several outputs have masks, classes that they ignore, or sample "
        "weights that they divide by, so that no one number says what the sum is over. Micro-batches count by their "
        "rows, and an update is not that of one batch. polyamp.train_step with polyamp.losses.Mean for each output is.",
        UserWarning,
        stacklevel=2,
    )

"""Around a skipped update: whether `scale_loss` was forgotten, what running statistics are, what to say when stuck.

Called by `LossScaleOptimizer`; none of it is saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from polyamp.errors import LossScaleError, ModelError
from polyamp_tensorflow.arrays import raw
from polyamp_tensorflow.models import is_built, variables_of


class ScaleCalls:
    """Which calls of `scale_loss` are known, to notice that one was forgotten.

    An eager call counts for one `apply`. A call in a graph is seen once, while it is traced, and may belong to any
    `apply` from then on.
    """

    def __init__(self) -> None:
        self._traced = False
        self._eager = False

    def note(self) -> None:
        """`scale_loss` was called."""
        if tf.executing_eagerly():
            self._eager = True
        else:
            self._traced = True

    def consume(self) -> None:
        """`apply` was called.

        Raises:
            LossScaleError: no call of `scale_loss` can belong to it.
        """
        if not (self._eager or self._traced):
            raise LossScaleError(
                "apply() was called, but scale_loss() was not since the last update: dividing by the scale would "
                "shrink correct gradients. Differentiate scaled = optimizer.scale_loss(loss), once for each apply()."
            )
        if tf.executing_eagerly():
            self._eager = False


class WindowStarts:
    """By model, variables for what running statistics were at the first micro-batch of a window."""

    def __init__(self) -> None:
        self._variables: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def of(self, model: Any) -> list[Any]:
        """The model's; created at the first call."""
        if model not in self._variables:
            with tf.init_scope():
                self._variables[model] = [
                    tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)
                    for variable in running_statistics(model)
                ]
        return self._variables[model]


def running_statistics(model: Any) -> list[Any]:
    """What the model's forward pass writes, but for the seeds of random numbers.

    Raises:
        ModelError: a model that is not built.
    """
    if not is_built(model):
        raise ModelError(
            "running statistics are known only of a built model. Build it or call it once first, or give its first "
            "layer an Input."
        )
    return [raw(variable) for variable in variables_of(model).left_by_a_forward_pass.values()]


def not_finite(gradient: Any) -> Any:
    """How many elements of a gradient are inf or NaN, int32 scalar."""
    return tf.reduce_sum(tf.cast(tf.logical_not(tf.math.is_finite(gradient)), tf.int32))


def write(variables: Iterable[Any], values: Iterable[Any]) -> None:
    """Assign each value to its variable."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def stuck_message(skips: int, floor: float, names: Sequence[str]) -> str:
    """What is said when the scale is at its floor and updates are skipped all the same."""
    return (
        f"{skips} steps in a row were skipped although the loss scale is at its floor of {floor:g}: the gradients are "
        f"not finite whatever the scale. Parameters with inf or NaN gradients: {', '.join(names) or 'unknown'}. Look "
        "for a division by zero, a log of zero or a mask of -inf in the model or the loss, or lower the learning rate; "
        "LossScaler(on_stuck=...) chooses 'raise', 'warn' or 'ignore'."
    )

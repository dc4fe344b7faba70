"""Reductions of losses, which record their divisor (S8), and `Mean` and `count` for a custom loss."""

from __future__ import annotations

import functools
import math
from typing import Any, Final, Literal

from polyamp.contract.backend import LossFunctions
from polyamp.contract.registry import backend_of
from polyamp.rules import loss_weights
from polyamp.rules.loss_argument_checks import check_mean_terms, check_weights

Reduction = Literal["mean", "sum", "none"]
"""What a loss makes of the losses of its rows: their mean, their sum, or the rows as they are."""


class Mean(loss_weights.MeanSum):
    """Custom loss as a total and its divisor, to be returned by `loss_fn` (S8, S9).

    A step adds totals and counts over its micro-batches and replicas before it divides, so the result is that of one
    batch. `Mean`s can be added, subtracted, and multiplied and divided by numbers: `ce + 0.1 * boxes`, each with its
    own count. An array that is added to one is weighted by the rows of its batch. A count of 0 everywhere skips the
    step.

    Args:
        total: the sum over the counted elements, a floating scalar of the framework.
        count: the number of elements or the sum of weights: a number or a scalar of the framework, at least 0.

    Raises:
        LossError: `total` is not a floating scalar, or `count` is not a scalar.

    >>> import numpy as np
    >>> losses, mask = np.array([1.0, 3.0, 5.0], "f4"), np.array([1.0, 1.0, 0.0], "f4")
    >>> Mean((losses * mask).sum(), mask.sum()) + 0.5 * Mean(losses.sum(), 3)
    Mean(1.0 * 4.0 / 2.0 + 0.5 * 9.0 / 3.0)
    """

    def __init__(self, total: Any, count: Any) -> None:
        check_mean_terms(total, count)
        losses = backend_of(total).losses
        with losses.in_float32():
            own = losses.constant(_number_as_array(count), total)
            super().__init__([loss_weights.MeanTerm(1.0, losses.wide(total, total), own, count)])


def count(values: Any) -> Any:
    """Return the number of counted elements, for `Mean` and `train_step(weight=...)`: the sum, without a gradient.

    Args:
        values: a boolean array, such as `batch["labels"] != -100`, or weights.

    Returns:
        A float32 scalar of the framework.

    >>> import numpy as np
    >>> float(count(np.array([3, -100, 7]) != -100))
    2.0
    """
    losses = backend_of(values).losses
    with losses.in_float32():
        return losses.constant(losses.sum(losses.constant(values, values)), values)


def weighted(losses: LossFunctions, values: Any, weights: Any, reduction: str, divides_by_weights: bool) -> Any:
    """Return the values times their weights, reduced.

    `divides_by_weights`: the mean is over the sum of the weights, not over the number of elements.
    """
    if weights is None:
        return reduce_values(losses, values, reduction)
    factors = losses.wide(weights, values)
    check_weights(factors, values)
    if divides_by_weights and reduction == "mean":  # torch's ratio of sums, with any broadcasting
        total, count = losses.sum(values * factors), _sum_over(losses, factors, values)
        return quotient(losses, total, count, values.shape, COUNT_LINES["weights"])
    return reduce_values(losses, values * factors, reduction)


def reduce_values(losses: LossFunctions, values: Any, reduction: str) -> Any:
    """Return the values, their sum or their mean, which divides by the number of elements."""
    if reduction == "none":
        return values
    if reduction == "sum":
        return losses.sum(values)
    loss = losses.mean(values)
    loss_weights.record_mean(loss, None, values.shape, size=functools.partial(_element_count, losses, values))
    return loss


def quotient(losses: LossFunctions, total: Any, count: Any, shape: Any, line: str) -> Any:
    """Return a mean over the counted elements: NaN, with gradients of 0, if there are none."""
    fixed = losses.constant(count, total)
    some = fixed > 0.0
    loss = total / losses.where(some, count, 1.0) + losses.where(some, 0.0, float("nan"))
    loss_weights.record_mean(loss, fixed, shape, line)
    return loss


def _element_count(losses: LossFunctions, values: Any) -> Any:
    """Return the number of elements of an array whose shape is unknown while tracing."""
    return losses.constant(losses.sum(losses.where(values < 0.0, 1.0, 1.0)), values)


def _sum_over(losses: LossFunctions, factors: Any, values: Any) -> Any:
    """Return the sum over all elements of `values` of factors that broadcast to it."""
    if None in tuple(values.shape):  # unknown while tracing
        return losses.sum(losses.where(values < 0.0, factors, factors))
    return losses.mean(factors) * float(math.prod(values.shape))


def _number_as_array(count: Any) -> Any:
    """Convert a Python number to a NumPy scalar."""
    import numpy as np

    return np.float32(count) if isinstance(count, int | float) else count


COUNT_LINES: Final = {
    "labels": "polyamp.losses.count(batch['labels'] != ignore_index)",
    "classes": "polyamp.losses.count(class_weights[batch['labels']])",
    "tokens": "polyamp.losses.count(batch['tokens'] != ignore_index)",
    "next tokens": "polyamp.losses.count(batch['tokens'][:, 1:] != ignore_index)",
    "weights": "polyamp.losses.count(batch['weights'])",
}
"""Divisor of a loss -> its source text in `train_step(weight=lambda batch: ...)`."""

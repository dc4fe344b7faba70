"""Losses of each element: squared error, Huber, binary cross-entropy, focal."""

from __future__ import annotations

from typing import Any

from polyamp.contract.registry import backend_of
from polyamp.errors import LossError
from polyamp.losses.means import COUNT_LINES, Reduction, quotient, reduce_values, sum_over
from polyamp.results import ArrayT
from polyamp.rules.loss_argument_checks import check_loss_pair, check_reduction, check_weights


def mean_squared_error(
    predictions: ArrayT, targets: Any, *, weights: Any = None, reduction: Reduction = "mean"
) -> ArrayT:
    """Return the squared difference, as `torch.nn.functional.mse_loss` does.

    Args:
        predictions: floating array of any shape.
        targets: floating array of the same shape.
        weights: factors of the elements, of a shape that broadcasts to that of the predictions.
        reduction: "mean" or "sum" for a scalar, "none" for an array of the predictions' shape. With weights the mean is
            weighted: the sum over the elements divided by the sum of their weights, as in torch.

    Raises:
        LossError: the shapes do not match, or the reduction is unknown.

    >>> import numpy as np
    >>> predictions, targets = np.array([1.0, 3.0], "f4"), np.array([1.0, 1.0], "f4")
    >>> float(mean_squared_error(predictions, targets))
    2.0
    >>> float(mean_squared_error(predictions, targets, reduction="sum"))
    4.0
    >>> float(mean_squared_error(predictions, targets, weights=np.array([3.0, 1.0], "f4")))
    1.0
    """
    return _elementwise_loss(
        "mean_squared_error", predictions, targets, weights=weights, reduction=reduction, divides_by_weights=True
    )


def sigmoid_cross_entropy(
    logits: ArrayT, targets: Any, *, weights: Any = None, reduction: Reduction = "mean"
) -> ArrayT:
    """Return binary cross-entropy of sigmoid(logits) with targets in [0, 1], in nats, as in
    `torch.nn.functional.binary_cross_entropy_with_logits`.

    Args:
        logits: floating array of any shape.
        targets: floating array of the same shape.
        weights: factors of the elements, of a shape that broadcasts to that of the logits.
        reduction: "mean" or "sum" for a scalar, "none" for an array of the same shape. The mean divides by the number
            of elements, also with weights, as in torch.

    Raises:
        LossError: the shapes do not match, or the reduction is unknown.

    >>> import numpy as np
    >>> round(float(sigmoid_cross_entropy(np.zeros(3, "f4"), np.ones(3, "f4"))), 4)
    0.6931
    >>> weights = np.array([0.0, 1.0, 2.0], "f4")
    >>> sigmoid_cross_entropy(np.zeros(3, "f4"), np.ones(3, "f4"), weights=weights, reduction="none").round(2).tolist()
    [0.0, 0.6899999976158142, 1.3899999856948853]
    """
    return _elementwise_loss("sigmoid_cross_entropy", logits, targets, weights=weights, reduction=reduction)


def huber(
    predictions: ArrayT, targets: Any, *, delta: float = 1.0, weights: Any = None, reduction: Reduction = "mean"
) -> ArrayT:
    """Return half the squared difference up to `delta`, linear beyond it, as `torch.nn.functional.huber_loss` does.

    Args:
        predictions: floating array of any shape.
        targets: floating array of the same shape.
        delta: where the loss becomes linear, in the unit of the predictions.
        weights: factors of the elements, of a shape that broadcasts to that of the predictions.
        reduction: "mean" or "sum" for a scalar, "none" for an array of the same shape. The mean divides by the number
            of elements, also with weights, as in torch.

    Raises:
        LossError: the shapes do not match, delta is not above 0, or the reduction is unknown.

    >>> import numpy as np
    >>> float(huber(np.array([3.0], "f4"), np.array([0.0], "f4")))
    2.5
    """
    if not delta > 0.0:
        raise LossError(f"huber needs delta above 0. Received: delta={delta!r}.")
    return _elementwise_loss("huber", predictions, targets, delta, weights=weights, reduction=reduction)


def _elementwise_loss(
    name: str,
    predictions: Any,
    targets: Any,
    *options: Any,
    weights: Any,
    reduction: str,
    divides_by_weights: bool = False,
) -> Any:
    """Return the loss that `LossFunctions` computes elementwise under this name, weighted and reduced.

    `divides_by_weights`: the mean is over the sum of the weights, not over the number of elements.
    """
    check_reduction(reduction)
    losses = backend_of(predictions).losses
    check_loss_pair(predictions, targets, what=name)
    with losses.in_float32():
        values = getattr(losses, name)(predictions, targets, *options)
        if weights is None:
            return reduce_values(losses, values, reduction)
        factors = losses.wide(weights, predictions)
        check_weights(factors, predictions)
        if divides_by_weights and reduction == "mean":  # torch's ratio of sums, with any broadcasting
            count = sum_over(losses, factors, values)
            return quotient(losses, losses.sum(values * factors), count, values.shape, COUNT_LINES["weights"])
        return reduce_values(losses, values * factors, reduction)

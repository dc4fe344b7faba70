"""Losses that read the same in every framework: float32 inside (S4), dispatched on the array's type.

Every function takes the framework's own arrays and returns the mean over all elements as a float32 scalar, or with
`reduction="none"` the elementwise values. Shapes that do not match are refused, not broadcast.
"""

from __future__ import annotations

from typing import Any, Literal

from polyamp import registry
from polyamp.checks import check_labels, check_loss_pair
from polyamp.errors import LossError

Reduction = Literal["mean", "none"]


def mean_squared_error(predictions: Any, targets: Any, *, reduction: Reduction = "mean") -> Any:
    """Squared difference.

    Args:
        predictions: floating array of any shape.
        targets: floating array of the same shape.
        reduction: "mean" for a scalar, "none" for an array of the same shape.

    Raises:
        LossError: the shapes differ.

    >>> import numpy as np
    >>> float(mean_squared_error(np.array([1.0, 3.0], "f4"), np.array([1.0, 1.0], "f4")))
    2.0
    """
    losses = registry.backend_for(predictions).losses
    check_loss_pair(predictions, targets, what="mean_squared_error")
    return _reduced(losses, losses.mean_squared_error(predictions, targets), reduction)


def softmax_cross_entropy(logits: Any, labels: Any, *, reduction: Reduction = "mean") -> Any:
    """Cross-entropy of softmax(logits) against integer labels, in nats.

    Args:
        logits: floating array, shape (..., classes).
        labels: integer array, shape (...).
        reduction: "mean" for a scalar, "none" for shape (...).

    Raises:
        LossError: the labels do not have one integer per row of logits.

    >>> import numpy as np
    >>> round(float(softmax_cross_entropy(np.zeros((1, 4), "f4"), np.array([2]))), 4)
    1.3863
    """
    losses = registry.backend_for(logits).losses
    check_labels(logits, labels)
    return _reduced(losses, losses.softmax_cross_entropy(logits, labels), reduction)


def sigmoid_cross_entropy(logits: Any, targets: Any, *, reduction: Reduction = "mean") -> Any:
    """Binary cross-entropy of sigmoid(logits) against targets in [0, 1], in nats.

    Args:
        logits: floating array of any shape.
        targets: floating array of the same shape.
        reduction: "mean" for a scalar, "none" for an array of the same shape.

    Raises:
        LossError: the shapes differ.

    >>> import numpy as np
    >>> round(float(sigmoid_cross_entropy(np.zeros(3, "f4"), np.ones(3, "f4"))), 4)
    0.6931
    """
    losses = registry.backend_for(logits).losses
    check_loss_pair(logits, targets, what="sigmoid_cross_entropy")
    return _reduced(losses, losses.sigmoid_cross_entropy(logits, targets), reduction)


def huber(predictions: Any, targets: Any, *, delta: float = 1.0, reduction: Reduction = "mean") -> Any:
    """Half the squared difference up to `delta`, linear beyond it.

    Args:
        predictions: floating array of any shape.
        targets: floating array of the same shape.
        delta: where the loss turns linear, in the unit of the predictions.
        reduction: "mean" for a scalar, "none" for an array of the same shape.

    Raises:
        LossError: the shapes differ, or delta is not above 0.

    >>> import numpy as np
    >>> float(huber(np.array([3.0], "f4"), np.array([0.0], "f4")))
    2.5
    """
    if not delta > 0.0:
        raise LossError(f"huber needs delta above 0. Received: delta={delta!r}.")
    losses = registry.backend_for(predictions).losses
    check_loss_pair(predictions, targets, what="huber")
    return _reduced(losses, losses.huber(predictions, targets, delta), reduction)


def _reduced(losses: Any, values: Any, reduction: str) -> Any:
    if reduction == "none":
        return values
    if reduction != "mean":
        raise LossError(f"reduction must be 'mean' or 'none'. Received: reduction={reduction!r}.")
    return losses.mean(values)

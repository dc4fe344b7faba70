"""Losses of each element: squared error, Huber, binary cross-entropy, focal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from polyamp.contract.backend import LossFunctions
from polyamp.contract.registry import backend_of
from polyamp.errors import LossError
from polyamp.losses.means import Reduction, weighted
from polyamp.results import ArrayT
from polyamp.rules.loss_argument_checks import check_loss_pair, check_reduction


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
    return _weighted_loss(
        "mean_squared_error",
        lambda losses, x, y: losses.mean_squared_error(x, y),
        predictions,
        targets,
        weights,
        reduction,
        divides_by_weights=True,
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
    return _weighted_loss(
        "sigmoid_cross_entropy",
        lambda losses, x, y: losses.sigmoid_cross_entropy(x, y),
        logits,
        targets,
        weights,
        reduction,
    )


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
    return _weighted_loss(
        "huber", lambda losses, x, y: losses.huber(x, y, delta), predictions, targets, weights, reduction
    )


def sigmoid_focal(
    logits: ArrayT,
    targets: Any,
    *,
    gamma: float = 2.0,
    alpha: float | None = 0.25,
    weights: Any = None,
    reduction: Reduction = "mean",
) -> ArrayT:
    """Return the focal loss of sigmoid(logits), in nats (Lin et al., 2017, equation 5).

    With p = sigmoid(logits) and targets t it is `alpha_t * (1 - p_t)^gamma * CE`, where CE is `sigmoid_cross_entropy`,
    `1 - p_t = p * (1 - t) + (1 - p) * t` and `alpha_t = alpha * t + (1 - alpha) * (1 - t)`: torchvision's and optax's
    `sigmoid_focal_loss`, and Keras's `BinaryFocalCrossentropy(from_logits=True, apply_class_balancing=True)`.
    torchvision's default reduction is "none". Detectors divide the sum by the number of positives: `Mean(sum, count)`.

    `1 - p_t` keeps its digits where p_t rounds to 1, so a gamma below 1 has a finite gradient there too, which is NaN
    in torchvision.

    Args:
        logits: floating array of any shape.
        targets: floating array of the same shape, in [0, 1].
        gamma: how much less a well classified element counts, at least 0; 0 is the cross-entropy.
        alpha: weight of the positives in [0, 1], of the negatives 1 - alpha; None for neither.
        weights: factors of the elements, of a shape that broadcasts to that of the logits.
        reduction: "mean" or "sum" for a scalar, "none" for an array of the same shape. The mean divides by the number
            of elements, also with weights.

    Raises:
        LossError: the shapes do not match, gamma or alpha is out of range, or the reduction is unknown.

    >>> import numpy as np
    >>> logits, targets = np.array([0.0, 2.0, -2.0], "f4"), np.array([1.0, 1.0, 1.0], "f4")
    >>> sigmoid_focal(logits, targets, alpha=None, reduction="none").round(4).tolist()
    [0.17329999804496765, 0.0017999999690800905, 1.6500999927520752]
    """
    if not 0.0 <= gamma < float("inf"):
        raise LossError(f"sigmoid_focal needs gamma of at least 0. Received: gamma={gamma!r}.")
    if alpha is not None and not 0.0 <= alpha <= 1.0:
        raise LossError(f"sigmoid_focal needs alpha in [0, 1] or None. Received: alpha={alpha!r}.")

    def focal(losses: LossFunctions, logits: Any, targets: Any) -> Any:
        costs, truth = losses.sigmoid_cross_entropy(logits, targets), losses.wide(targets, logits)
        nothing = truth * 0.0
        positive = losses.exp(-losses.sigmoid_cross_entropy(logits, nothing + 1.0))  # sigmoid(logits)
        negative = losses.exp(-losses.sigmoid_cross_entropy(logits, nothing))  # sigmoid(-logits)
        miss = positive * (1.0 - truth) + negative * truth
        miss = losses.where(losses.constant(miss, miss) > _SMALLEST, miss, _SMALLEST)  # beyond it the gradient is 0
        costs = losses.exp(gamma * losses.log(miss)) * costs
        return costs if alpha is None else costs * (alpha * truth + (1.0 - alpha) * (1.0 - truth))

    return _weighted_loss("sigmoid_focal", focal, logits, targets, weights, reduction)


_SMALLEST: Final = 2.0**-126
"""Smallest normal number of float32."""


def _weighted_loss(
    name: str,
    function: Callable[[LossFunctions, Any, Any], Any],
    predictions: Any,
    targets: Any,
    weights: Any,
    reduction: str,
    *,
    divides_by_weights: bool = False,
) -> Any:
    """Return an elementwise loss, weighted and reduced.

    `divides_by_weights`: the mean is over the sum of the weights, not over the number of elements.
    """
    check_reduction(reduction)
    losses = backend_of(predictions).losses
    check_loss_pair(predictions, targets, what=name)
    with losses.in_float32():
        return weighted(losses, function(losses, predictions, targets), weights, reduction, divides_by_weights)

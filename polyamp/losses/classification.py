"""Losses of distributions over classes: cross-entropy with labels or probabilities, and the divergence of two."""

from __future__ import annotations

from typing import Any

from polyamp.contract.backend import LossFunctions
from polyamp.contract.registry import backend_of
from polyamp.errors import LossError
from polyamp.losses.means import COUNT_LINES, Reduction, quotient, reduce_values, weighted
from polyamp.results import ArrayT
from polyamp.rules import loss_weights
from polyamp.rules.loss_argument_checks import (
    check_class_weights,
    check_ignore_index,
    check_label_range,
    check_labels,
    check_loss_pair,
    check_reduction,
    check_smoothing,
)


def softmax_cross_entropy(
    logits: ArrayT,
    labels: Any,
    *,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    class_weights: Any = None,
    reduction: Reduction = "mean",
) -> ArrayT:
    """Return cross-entropy of softmax(logits) with labels or probabilities, in nats, as in torch's `cross_entropy`.

    With integer labels y a row's loss is `class_weights[y] * -log p[y]`, and with smoothing e of C classes
    `(1 - e)` times that plus `e / C * sum(class_weights * -log p)`. Soft targets (mixup, distillation) are passed as
    probabilities t in place of labels: `sum(class_weights * t' * -log p)` with `t' = (1 - e) * t + e / C`.

    A row whose label is `ignore_index` has the loss 0 and no gradient, whatever its logits are, even infinite or NaN.
    The mean divides by the rows that are not ignored, each counted as its `class_weights[y]`; it is NaN if there is
    none, with gradients of 0. With probabilities it divides by the number of rows.

    A label outside of the classes never counts as another class. If its value is on the host (NumPy labels, eager
    tensors on a CPU) it is an error; in a traced or compiled function and on an accelerator the row's loss and gradient
    are NaN.

    Args:
        logits: floating array, shape (..., classes).
        labels: integer array, shape (...); or floating array of the logits' shape: probabilities.
        ignore_index: a label whose rows do not count; default None, not torch's -100. With integer labels only.
        label_smoothing: part of the target, in [0, 1], that is spread evenly over the classes.
        class_weights: factors of the classes, shape (classes,).
        reduction: "mean" or "sum" for a scalar, "none" for shape (...), with 0 for ignored rows.

    Raises:
        LossError: labels that do not match the logits, a label outside of the classes, or an impossible argument.

    >>> import numpy as np
    >>> round(float(softmax_cross_entropy(np.zeros((1, 4), "f4"), np.array([2]))), 4)
    1.3863
    >>> logits = np.array([[0.0, 2.0], [9.0, 0.0]], "f4")
    >>> rows = softmax_cross_entropy(logits, np.array([1, -100]), ignore_index=-100, reduction="none")
    >>> rows.round(4).tolist(), round(float(softmax_cross_entropy(logits, np.array([1, -100]), ignore_index=-100)), 4)
    ([0.12690000236034393, 0.0], 0.1269)
    >>> mixed = np.array([[0.25, 0.75], [1.0, 0.0]], "f4")
    >>> round(float(softmax_cross_entropy(logits, mixed, label_smoothing=0.1)), 4)
    0.5635
    """
    check_reduction(reduction)
    if label_smoothing:
        check_smoothing(label_smoothing)
    losses = backend_of(logits).losses
    soft = check_labels(logits, labels)
    rows_shape = tuple(getattr(logits, "shape", ()))[:-1]
    if ignore_index is not None:
        check_ignore_index(ignore_index, soft=soft)
    with losses.in_float32():
        weights = None
        if class_weights is not None:
            weights = losses.wide(class_weights, logits)
            check_class_weights(weights, logits)
        if soft:
            return reduce_values(losses, _soft_rows(losses, logits, labels, label_smoothing, weights), reduction)
        on_host = losses.on_host(labels)
        if on_host is not None:
            check_label_range(on_host, losses.classes(logits), ignore_index)
            if ignore_index is None and weights is None and not label_smoothing:
                loss = losses.softmax_cross_entropy(logits, losses.indices(labels, logits), reduction)
                if reduction == "mean":
                    loss_weights.record_mean(loss, None, rows_shape)
                return loss
        rows, shares = label_rows(
            losses, logits, losses.indices(labels, logits), on_host is None, ignore_index, label_smoothing, weights
        )
        if reduction == "mean" and shares is not None:
            line = COUNT_LINES["labels" if weights is None else "classes"]
            return quotient(losses, losses.sum(rows), losses.sum(shares), rows_shape, line)
        return reduce_values(losses, rows, reduction)


def kl_divergence(
    logits: ArrayT, target_logits: Any, *, temperature: float = 1.0, weights: Any = None, reduction: Reduction = "mean"
) -> ArrayT:
    """Return the divergence of softmax(logits / T) from softmax(target_logits / T), times T^2, in nats.

    With p of the target logits and q of the logits a row's loss is `T^2 * sum(p * (log p - log q))`. For a student and
    its teacher this is distillation (Hinton et al., 2015), in which T^2 keeps the size of the gradients. It is
    `T * T * torch.nn.functional.kl_div(log q, log p, reduction="batchmean", log_target=True)` for logits of two axes;
    torch's own default, "mean", divides by the classes too. Keras and optax take probabilities and have no T^2.

    A class that the target logits rule out with -inf adds nothing, even where the logits do so too; it is NaN in
    torch. The target logits have a gradient unless they are detached.

    Args:
        logits: floating array, shape (..., classes).
        target_logits: floating array of the same shape: the teacher's logits.
        temperature: what both are divided by, above 0.
        weights: factors of the rows, of a shape that broadcasts to (...): 0 for padding.
        reduction: "mean" or "sum" for a scalar, "none" for shape (...). With weights the mean is the sum over the rows
            divided by the sum of their weights.

    Raises:
        LossError: the shapes do not match, the temperature is not above 0, or the reduction is unknown.

    >>> import numpy as np
    >>> student, teacher = np.array([[0.0, 0.0]], "f4"), np.array([[0.0, 2.0]], "f4")
    >>> [round(float(kl_divergence(student, teacher, temperature=t)), 4) for t in (1.0, 4.0)]
    [0.3278, 0.4848]
    """
    check_reduction(reduction)
    if not 0.0 < temperature < float("inf"):
        raise LossError(f"kl_divergence needs a temperature above 0. Received: temperature={temperature!r}.")
    check_loss_pair(logits, target_logits, what="kl_divergence")
    losses = backend_of(logits).losses
    with losses.in_float32():
        own, target = (
            losses.log_softmax(losses.wide(array, logits) * (1.0 / temperature)) for array in (logits, target_logits)
        )
        p = losses.exp(target)
        some = losses.constant(p, p) > 0.0
        distance = losses.where(some, target, 0.0) - losses.where(some, own, 0.0)
        rows = losses.sum(p * distance, -1) * float(temperature) ** 2
        return weighted(losses, rows, weights, reduction, divides_by_weights=True)


def label_rows(
    losses: LossFunctions,
    logits: Any,
    labels: Any,
    unchecked: bool,
    ignore_index: int | None,
    smoothing: float = 0.0,
    weights: Any = None,
    z_loss: float = 0.0,
) -> tuple[Any, Any]:
    """Return (loss of each row, weight of each row in the mean); the latter is None if each weighs 1.

    `labels` are from `LossFunctions.indices`. `unchecked`: they have not been checked against the classes.
    `z_loss`: the factor of the squared logarithm of each row's normaliser.

    A backend's functions receive only labels within the classes. Ignored rows are masked twice, before and after,
    because the derivative of a masked NaN is NaN.
    """
    own = given = labels
    inside = (given >= 0) & (given < losses.classes(logits)) if unchecked else None
    counted = None if ignore_index is None else given != ignore_index
    if inside is not None:
        own = losses.where(inside, own, 0)
    if counted is not None:
        own = losses.where(counted, own, 0)
        logits = losses.where(counted[..., None], logits, 0.0)
    factors = None if weights is None else losses.take(weights, own)
    if smoothing:
        costs = -losses.log_softmax(logits)
        rows = losses.pick(costs, own)
    else:
        rows = losses.softmax_cross_entropy(logits, own, "none")
    if z_loss:  # the normaliser is the row's loss and its own logit: one more pass over the logits less
        log_normaliser = rows + losses.pick(losses.wide(logits, logits), own)
        rows = rows + z_loss * log_normaliser * log_normaliser
    if factors is not None:
        rows = rows * factors
    if smoothing:
        spread = losses.mean(costs if weights is None else costs * weights, -1)
        rows = (1.0 - smoothing) * rows + smoothing * spread
    if inside is not None:  # a factor, so the gradient is NaN too and nobody trains on the other rows
        valid = inside if counted is None else inside | (given == ignore_index)
        rows = rows * losses.where(valid, 1.0, float("nan"))
    if counted is None:
        return rows, factors
    return losses.where(counted, rows, 0.0), losses.where(counted, 1.0 if factors is None else factors, 0.0)


def _soft_rows(losses: LossFunctions, logits: Any, targets: Any, smoothing: float, weights: Any) -> Any:
    """Return the loss of each row with probabilities."""
    costs = -losses.log_softmax(logits)
    if weights is not None:
        costs = costs * weights
    rows = losses.sum(losses.wide(targets, logits) * costs, -1)
    return (1.0 - smoothing) * rows + smoothing * losses.mean(costs, -1) if smoothing else rows

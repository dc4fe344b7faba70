"""Losses with one interface for every framework: torch's formulas (S24), float32 inside (S4).

They dispatch on the array's type. Each takes the framework's own arrays; labels, targets and weights may also be NumPy
arrays. The formulas use the few functions of `polyamp.contract.backend.LossFunctions` that a backend implements. Shapes
that do not match are an error, they are not broadcast.

A mean records its divisor, so that a step can weigh micro-batches and replicas (S8); `Mean` and `count` do this for a
custom loss. `regularization` is what a model adds to the loss by itself (S25); `sum_of_squares` makes a penalty of
parameters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, Final, Literal

from polyamp.contract.backend import LossFunctions
from polyamp.contract.registry import backend_of
from polyamp.errors import LossError
from polyamp.results import ArrayT
from polyamp.rules import loss_weights
from polyamp.rules.loss_argument_checks import (
    check_class_weights,
    check_ignore_index,
    check_label_range,
    check_labels,
    check_loss_pair,
    check_mean_terms,
    check_reduction,
    check_smoothing,
    check_weights,
)

Reduction = Literal["mean", "sum", "none"]


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
    check_smoothing(label_smoothing)
    losses = backend_of(logits).losses
    soft = check_labels(logits, labels)
    rows_shape = tuple(getattr(logits, "shape", ()))[:-1]
    check_ignore_index(ignore_index, soft=soft)
    with losses.in_float32():
        weights = None
        if class_weights is not None:
            weights = losses.wide(class_weights, logits)
            check_class_weights(weights, logits)
        if soft:
            return _reduce_values(losses, _soft_rows(losses, logits, labels, label_smoothing, weights), reduction)
        on_host = losses.on_host(labels)
        if on_host is not None:
            check_label_range(on_host, losses.classes(logits), ignore_index)
            if ignore_index is None and weights is None and not label_smoothing:
                loss = losses.softmax_cross_entropy(logits, losses.indices(labels, logits), reduction)
                if reduction == "mean":
                    loss_weights.record_mean(loss, None, rows_shape)
                return loss
        rows, shares = _hard_rows(losses, logits, labels, on_host is None, ignore_index, label_smoothing, weights)
        if reduction == "mean" and shares is not None:
            line = _COUNT_LINES["labels" if weights is None else "classes"]
            return _quotient(losses, losses.sum(rows), losses.sum(shares), rows_shape, line)
        return _reduce_values(losses, rows, reduction)


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


def sum_of_squares(values: Any) -> Any:
    """Return the sum of the squares of all elements (|z|² if complex) in float32: for parameters, their L2 penalty.

    Args:
        values: a floating array, or a mapping, list or tuple of them, such as `polyamp.parameters(model)`.

    Returns:
        A float32 scalar of the framework.

    Raises:
        LossError: there is no array.

    >>> import numpy as np
    >>> float(sum_of_squares({"w": np.array([1.0, 2.0], "f4"), "b": np.array(3.0, "f4")}))
    14.0
    """
    arrays = [part for array in _array_leaves(values) for part in _real_parts(array)]
    if not arrays:
        raise LossError(f"sum_of_squares needs at least one array. Received: {values!r}.")
    losses = backend_of(arrays[0]).losses
    with losses.in_float32():
        squares = [losses.wide(array, arrays[0]) for array in arrays]
        total = losses.sum(squares[0] * squares[0])
        for wide in squares[1:]:
            total = total + losses.sum(wide * wide)
    return total


def _real_parts(array: Any) -> tuple[Any, ...]:
    """Return a real array, or both parts of a complex one."""
    return (array.real, array.imag) if "complex" in str(getattr(array, "dtype", "")) else (array,)


def regularization(model: Any) -> Any:
    """Return the regularization that a model adds to its loss by itself, for `loss_fn` to add (S25).

    In Keras it is what `compile` and `fit` add: the regularizers of trainable weights, and the terms that `add_loss`
    and the activity regularizers collected in the model's last call. In the other frameworks a model adds nothing.

    Args:
        model: the model that `loss_fn` receives, or a part of it; or a framework's own model, in a custom loop.

    Returns:
        A float32 scalar of the framework; 0 where there is nothing.

    >>> from polyamp.reference import MLP
    >>> float(regularization(MLP.random([4, 1], seed=0)))
    0.0
    """
    return backend_of(model).regularization(model)


def _array_leaves(values: Any) -> list[Any]:
    """Return the leaves of nested mappings, lists and tuples, without None."""
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, list | tuple):
        return [array for item in values for array in _array_leaves(item)]
    return [] if values is None else [values]


def _hard_rows(
    losses: LossFunctions,
    logits: Any,
    labels: Any,
    unchecked: bool,
    ignore_index: int | None,
    smoothing: float,
    weights: Any,
) -> tuple[Any, Any]:
    """Return (loss of each row, weight of each row in the mean); the latter is None if each weighs 1.

    `unchecked`: the labels have not been checked against the classes.

    A backend's functions receive only labels within the classes. Ignored rows are masked twice, before and after,
    because the derivative of a masked NaN is NaN.
    """
    own = given = losses.indices(labels, logits)
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
            return _reduce_values(losses, values, reduction)
        factors = losses.wide(weights, predictions)
        check_weights(factors, predictions)
        if divides_by_weights and reduction == "mean":  # torch's ratio of sums, with any broadcasting
            count = _sum_over(losses, factors, values)
            return _quotient(losses, losses.sum(values * factors), count, values.shape, _COUNT_LINES["weights"])
        return _reduce_values(losses, values * factors, reduction)


def _reduce_values(losses: LossFunctions, values: Any, reduction: str) -> Any:
    if reduction == "none":
        return values
    if reduction == "sum":
        return losses.sum(values)
    loss = losses.mean(values)
    loss_weights.record_mean(loss, None, values.shape, size=functools.partial(_element_count, losses, values))
    return loss


def _quotient(losses: LossFunctions, total: Any, count: Any, shape: Any, line: str) -> Any:
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


_COUNT_LINES: Final = {
    "labels": "polyamp.losses.count(batch['labels'] != ignore_index)",
    "classes": "polyamp.losses.count(class_weights[batch['labels']])",
    "weights": "polyamp.losses.count(batch['weights'])",
}
"""Divisor of a loss -> its source text in `train_step(weight=lambda batch: ...)`."""


def __getattr__(name: str) -> Any:
    """Raise an error that suggests polyamp's name for other libraries' names of these losses."""
    from polyamp.errors import did_you_mean

    if name.startswith("__"):
        raise AttributeError(f"module 'polyamp.losses' has no attribute {name!r}")
    plain = name.lower().replace("_", "").removesuffix("loss")
    known = _OTHER_NAMES.get(plain)
    meant = f" Did you mean {known!r}?" if known else did_you_mean(name, sorted(set(_OTHER_NAMES.values())))
    raise AttributeError(f"module 'polyamp.losses' has no attribute {name!r}.{meant}")


_OTHER_NAMES: Final = {
    **dict.fromkeys(("mse", "l2", "meansquarederror"), "mean_squared_error"),
    **dict.fromkeys(
        ("crossentropy", "ce", "nll", "categoricalcrossentropy", "sparsecategoricalcrossentropy",
         "softmaxcrossentropywithintegerlabels"), "softmax_cross_entropy"),
    **dict.fromkeys(
        ("bce", "binarycrossentropy", "bcewithlogits", "binarycrossentropywithlogits", "sigmoidbinarycrossentropy"),
        "sigmoid_cross_entropy"),
    **dict.fromkeys(("smoothl1", "huber"), "huber"),
}  # fmt: skip
"""Other name of a loss, normalized and without "loss" -> the name here."""

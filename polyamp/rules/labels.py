"""What `polyamp.losses` refuses: labels, weights and options that do not fit (S24). Knows no framework.

The order matters for speed: the plain call pays for two comparisons of shapes and, where labels are on the host, one
pass over them.
"""

from __future__ import annotations

import operator
from typing import Any

from polyamp.errors import LossError, described


def check_reduction(reduction: str) -> None:
    """Refuse an unknown reduction."""
    if reduction not in ("mean", "sum", "none"):
        raise LossError(f"reduction must be 'mean', 'sum' or 'none'. Received: reduction={reduction!r}.")


def check_smoothing(smoothing: float) -> None:
    """Refuse a smoothing outside of [0, 1]."""
    if not 0.0 <= smoothing <= 1.0:
        raise LossError(f"label_smoothing must be in [0, 1]. Received: label_smoothing={smoothing!r}.")


def check_ignore_index(ignore_index: Any, *, soft: bool) -> None:
    """Refuse an `ignore_index` that is not an integer, or that stands beside probabilities."""
    if ignore_index is None:
        return
    try:
        operator.index(ignore_index)
    except TypeError:
        raise LossError(
            f"ignore_index must be an integer label or None. Received: ignore_index={ignore_index!r}."
        ) from None
    if soft:
        raise LossError(
            f"ignore_index names an integer label, and the labels are probabilities. Received: ignore_index="
            f"{ignore_index}. Leave it out; a row whose probabilities are all 0 adds nothing to the sum."
        )


def check_loss_pair(predictions: Any, targets: Any, *, what: str) -> None:
    """Refuse predictions and targets whose shapes differ: broadcasting them would give a wrong mean silently."""
    if not _same_shape(predictions.shape, targets.shape):
        raise LossError(
            f"{what} needs predictions and targets of one shape. Received: {tuple(predictions.shape)} and "
            f"{tuple(targets.shape)}."
        )


def check_labels(logits: Any, labels: Any) -> bool:
    """Whether the labels are probabilities, of the logits' shape; otherwise they index the last axis of the logits.

    Raises:
        LossError: they are neither; says what to do.
    """
    dtype = str(getattr(labels, "dtype", None))
    if "int" in dtype:
        if _same_shape(labels.shape, logits.shape[:-1]):
            return False
        one_hot = _same_shape(labels.shape, logits.shape)
        advice = " One-hot labels: pass their argmax, or cast them to float32." if one_hot else ""
        raise _misfit(logits, f"{dtype} of shape {tuple(labels.shape)}.{advice}")
    if "float" in dtype:
        if _same_shape(labels.shape, logits.shape):
            return True
        advice = " Labels: cast them to integers." if _same_shape(labels.shape, logits.shape[:-1]) else ""
        raise _misfit(logits, f"{dtype} of shape {tuple(labels.shape)}.{advice}")
    raise _misfit(logits, f"{type(labels).__name__}. Make it an array of numbers.")


def _misfit(logits: Any, received: str) -> LossError:
    return LossError(
        f"softmax_cross_entropy needs integer labels of shape {tuple(logits.shape)[:-1]}, one per row of the logits, "
        f"or floating probabilities of the logits' shape {tuple(logits.shape)}. Received: {received}"
    )


def check_label_range(labels: Any, classes: int, ignore_index: int | None) -> None:
    """Refuse labels outside of the classes, the ignored one apart.

    Args:
        labels: integer NumPy array.
        classes: how many there are.
        ignore_index: a label that may stand anywhere, or None.
    """
    import numpy as np

    counted = labels if ignore_index is None else labels[labels != ignore_index]
    unsigned = counted.view(counted.dtype.str.replace("i", "u"))  # where a negative label is a huge one
    if unsigned.size == 0 or int(unsigned.max()) < classes:
        return
    outside = (labels < 0) | (labels >= classes)
    if ignore_index is not None:
        outside &= labels != ignore_index
    position = tuple(map(int, np.unravel_index(int(np.argmax(outside)), labels.shape)))
    raise LossError(
        f"softmax_cross_entropy needs labels from 0 to {classes - 1}, for logits of {classes} classes. Received: "
        f"{int(labels[position])} at index {position}; of {labels.size} labels {int(np.sum(outside))} are outside. "
        f"For rows that must not count, name their label: ignore_index={int(labels[position])}."
    )


def check_class_weights(weights: Any, logits: Any) -> None:
    """Refuse weights that are not one per class."""
    if not _same_shape(weights.shape, tuple(logits.shape)[-1:]):
        raise LossError(
            f"class_weights must have one number per class, shape {tuple(logits.shape)[-1:]}. Received shape: "
            f"{tuple(weights.shape)}."
        )


def check_weights(weights: Any, predictions: Any) -> None:
    """Refuse weights that do not broadcast to the shape of the predictions."""
    own, whole = tuple(weights.shape), tuple(predictions.shape)
    known = [(a, b) for a, b in zip(own[::-1], whole[::-1], strict=False) if None not in (a, b)]
    if len(own) > len(whole) or any(a != 1 and a != b for a, b in known):  # `in` fails on lengths of a trace in torch
        raise LossError(
            f"weights must broadcast to the shape of the predictions, {whole}. Received shape: {own}. Weights of the "
            "rows of an array with more axes: add axes of 1 behind."
        )


def check_mean(total: Any, count: Any) -> None:
    """Refuse a total or a count that is no scalar."""
    if not hasattr(total, "dtype") or tuple(getattr(total, "shape", (0,))) not in ((), (1,)):
        raise LossError(f"Mean(total, count): total must be a floating scalar. Received: {described(total)}.")
    if isinstance(count, int | float) and not isinstance(count, bool):
        if not 0.0 <= count < float("inf"):
            raise LossError(f"Mean(total, count): count must be at least 0 and finite. Received: {count}.")
    elif not hasattr(count, "dtype") or tuple(getattr(count, "shape", (0,))) != ():
        raise LossError(
            "Mean(total, count): count must be a number or a scalar, what the total is to be divided by. Received: "
            f"{described(count)}."
        )


def _same_shape(one: Any, other: Any) -> bool:
    """True unless the shapes differ; a length that is not known while tracing (None) fits any."""
    first, second = tuple(one), tuple(other)
    return len(first) == len(second) and all(a == b or None in (a, b) for a, b in zip(first, second, strict=True))

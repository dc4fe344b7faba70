"""Argument checks of `polyamp.losses`: labels, weights and options (S24). They know no framework.

Their order keeps the common call cheap: two comparisons of shapes and, for labels on the host, one pass over them.
"""

from __future__ import annotations

import operator
from typing import Any

from polyamp.errors import LossError, describe_value


def check_reduction(reduction: str) -> None:
    """Raise if the reduction is unknown."""
    if reduction not in ("mean", "sum", "none"):
        raise LossError(f"reduction must be 'mean', 'sum' or 'none'. Received: reduction={reduction!r}.")


def check_smoothing(smoothing: float) -> None:
    """Raise if the smoothing is outside of [0, 1]."""
    if not 0.0 <= smoothing <= 1.0:
        raise LossError(f"label_smoothing must be in [0, 1]. Received: label_smoothing={smoothing!r}.")


def check_ignore_index(ignore_index: Any, *, soft: bool) -> None:
    """Raise if `ignore_index` is not an integer, or is combined with probabilities."""
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
    """Raise if predictions and targets differ in shape: broadcasting them would silently give a wrong mean."""
    if not _is_same_shape(predictions.shape, targets.shape):
        raise LossError(
            f"{what} needs predictions and targets of one shape. Received: {tuple(predictions.shape)} and "
            f"{tuple(targets.shape)}."
        )


def check_labels(logits: Any, labels: Any) -> bool:
    """Whether the labels are probabilities of the logits' shape. Otherwise they index the last axis of the logits.

    Raises:
        LossError: they are neither; the message suggests a fix.
    """
    dtype = str(getattr(labels, "dtype", None))
    if "int" in dtype:
        if _is_same_shape(labels.shape, logits.shape[:-1]):
            return False
        one_hot = _is_same_shape(labels.shape, logits.shape)
        advice = " One-hot labels: pass their argmax, or cast them to float32." if one_hot else ""
        raise _label_shape_error(logits, f"{dtype} of shape {tuple(labels.shape)}.{advice}")
    if "float" in dtype:
        if _is_same_shape(labels.shape, logits.shape):
            return True
        advice = " Labels: cast them to integers." if _is_same_shape(labels.shape, logits.shape[:-1]) else ""
        raise _label_shape_error(logits, f"{dtype} of shape {tuple(labels.shape)}.{advice}")
    raise _label_shape_error(logits, f"{type(labels).__name__}. Make it an array of numbers.")


def _label_shape_error(logits: Any, received: str) -> LossError:
    return LossError(
        f"softmax_cross_entropy needs integer labels of shape {tuple(logits.shape)[:-1]}, one per row of the logits, "
        f"or floating probabilities of the logits' shape {tuple(logits.shape)}. Received: {received}"
    )


def check_label_range(labels: Any, classes: int, ignore_index: int | None, what: str = "softmax_cross_entropy") -> None:
    """Raise if a label is outside of the classes and is not the ignored one.

    Args:
        labels: integer NumPy array.
        classes: number of classes.
        ignore_index: a label that may have any value, or None.
        what: the loss, for the message.
    """
    import numpy as np

    counted = labels if ignore_index is None else labels[labels != ignore_index]
    unsigned = counted.view(counted.dtype.str.replace("i", "u"))  # a negative label becomes a huge one
    if unsigned.size == 0 or int(unsigned.max()) < classes:
        return
    outside = (labels < 0) | (labels >= classes)
    if ignore_index is not None:
        outside &= labels != ignore_index
    position = tuple(map(int, np.unravel_index(int(np.argmax(outside)), labels.shape)))
    raise LossError(
        f"{what} needs labels from 0 to {classes - 1}, for logits of {classes} classes. Received: "
        f"{int(labels[position])} at index {position}; of {labels.size} labels {int(np.sum(outside))} are outside. "
        f"For rows that must not count, name their label: ignore_index={int(labels[position])}."
    )


def check_tokens(rows: Any, tokens: Any, name: str, axes: str) -> None:
    """Raise if the tokens are not one integer per position.

    Args:
        rows: the shape of the positions, (..., length).
        tokens: the argument.
        name: name of the array whose positions they are.
        axes: its shape in words.
    """
    dtype = str(getattr(tokens, "dtype", None))
    if "int" not in dtype or not _is_same_shape(tokens.shape, rows) or not len(tuple(rows)):
        shape = f" of shape {tuple(tokens.shape)}" if hasattr(tokens, "shape") else ""
        raise LossError(
            f"tokens must be integers of shape {tuple(rows)}, one per position of {name}, whose shape is {axes}. "
            f"Received: {type(tokens).__name__ if dtype == 'None' else dtype}{shape}."
        )


def check_shift(tokens: Any) -> None:
    """Raise if a row of tokens has no next token."""
    length = tuple(tokens.shape)[-1]
    if length is not None and length < 2:
        raise LossError(
            f"shift=True predicts each next token, which needs rows of at least 2 tokens. Received: tokens of shape "
            f"{tuple(tokens.shape)}. For targets that are shifted already, give shift=False."
        )


def check_z_loss(z_loss: Any) -> None:
    """Raise if the factor of the z-loss is negative or not finite."""
    if not 0.0 <= z_loss < float("inf"):
        raise LossError(f"z_loss must be a factor of at least 0, such as 1e-4. Received: z_loss={z_loss!r}.")


def check_chunks(chunks: Any) -> None:
    """Raise if the number of chunks is not a positive integer."""
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise LossError(f"chunks must be an integer of at least 1. Received: chunks={chunks!r}.")


def check_head(hidden: Any, weight: Any, bias: Any) -> None:
    """Raise if the weight or the bias of a head do not fit the hidden states."""
    width, shape = tuple(hidden.shape)[-1], tuple(getattr(weight, "shape", ()))
    if len(shape) != 2 or (width is not None and shape[1] != width):
        turned = len(shape) == 2 and shape[0] == width
        advice = " That is a kernel as Keras and flax keep it: give its transpose." if turned else ""
        raise LossError(
            f"weight must have the shape (vocabulary, width) with the width of hidden, {width}. Received shape: "
            f"{shape}.{advice}"
        )
    if bias is not None and tuple(getattr(bias, "shape", ())) != shape[:1]:
        raise LossError(
            f"bias must have one number per token of the vocabulary, shape {shape[:1]}. Received shape: "
            f"{tuple(getattr(bias, 'shape', ()))}."
        )


def check_class_weights(weights: Any, logits: Any) -> None:
    """Raise if there is not one weight per class."""
    if not _is_same_shape(weights.shape, tuple(logits.shape)[-1:]):
        raise LossError(
            f"class_weights must have one number per class, shape {tuple(logits.shape)[-1:]}. Received shape: "
            f"{tuple(weights.shape)}."
        )


def check_weights(weights: Any, predictions: Any) -> None:
    """Raise if the weights do not broadcast to the shape of the predictions."""
    own, whole = tuple(weights.shape), tuple(predictions.shape)
    known = [(a, b) for a, b in zip(own[::-1], whole[::-1], strict=False) if None not in (a, b)]
    if len(own) > len(whole) or any(a != 1 and a != b for a, b in known):  # `in` fails on lengths of a trace in torch
        raise LossError(
            f"weights must broadcast to the shape of the predictions, {whole}. Received shape: {own}. Weights of the "
            "rows of an array with more axes: add axes of 1 behind."
        )


def check_mean_terms(total: Any, count: Any) -> None:
    """Raise if the total or the count is not a scalar."""
    if not hasattr(total, "dtype") or tuple(getattr(total, "shape", (0,))) not in ((), (1,)):
        raise LossError(f"Mean(total, count): total must be a floating scalar. Received: {describe_value(total)}.")
    if isinstance(count, int | float) and not isinstance(count, bool):
        if not 0.0 <= count < float("inf"):
            raise LossError(f"Mean(total, count): count must be at least 0 and finite. Received: {count}.")
    elif not hasattr(count, "dtype") or tuple(getattr(count, "shape", (0,))) != ():
        raise LossError(
            "Mean(total, count): count must be a number or a scalar, what the total is to be divided by. Received: "
            f"{describe_value(count)}."
        )


def _is_same_shape(one: Any, other: Any) -> bool:
    """Whether two shapes are compatible. A length that is unknown while tracing (None) matches any."""
    first, second = tuple(one), tuple(other)
    if first == second:
        return True
    return len(first) == len(second) and all(a == b or None in (a, b) for a, b in zip(first, second, strict=True))

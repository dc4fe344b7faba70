"""Argument checks of the CTC loss (S24)."""

from __future__ import annotations

from typing import Any

from polyamp.errors import LossError, describe_value


def check_ctc_arrays(logits: Any, labels: Any, logit_lengths: Any, label_lengths: Any, blank: Any, zero: Any) -> None:
    """Raise unless shapes and dtypes fit, and the options are possible."""
    shape, kind = tuple(getattr(logits, "shape", ())), str(getattr(logits, "dtype", ""))
    if len(shape) != 3 or "float" not in kind:
        raise LossError(
            f"ctc needs floating logits of shape (batch, frames, classes). Received: {describe_value(logits)} of shape "
            f"{shape}. torch's ctc_loss has the frames first: transpose them."
        )
    _check_integers("labels", labels, (shape[0], None), "(batch, length)")
    for name, lengths in (("logit_lengths", logit_lengths), ("label_lengths", label_lengths)):
        if lengths is not None:
            _check_integers(name, lengths, (shape[0],), "(batch,)")
    most = shape[2] if isinstance(shape[2], int) else 2**31
    if isinstance(blank, bool) or not isinstance(blank, int) or not 0 <= blank < most or most < 2:
        raise LossError(
            f"blank must be one of at least two classes, an integer from 0 to {most - 1}. Received: blank={blank!r}."
        )
    if not isinstance(zero, bool):
        raise LossError(f"zero_infinity must be True or False. Received: zero_infinity={zero!r}.")


def check_ctc_lengths(lengths: Any, most: Any, name: str) -> None:
    """Raise if a length that the host knows is larger than its axis, or too small."""
    least = 1 if name == "logit_lengths" else 0
    if lengths is None or not isinstance(most, int) or not lengths.size:
        return
    if lengths.min() < least or lengths.max() > most:
        raise LossError(f"{name} must be from {least} to {most}, the length of its axis. Received: {lengths.tolist()}.")


def check_ctc_labels(labels: Any, counts: Any, classes: Any, blank: int) -> None:
    """Raise if one of the first `counts` labels of a row, or of all if it is None, is the blank or no class."""
    import numpy as np

    used = True if counts is None else np.arange(labels.shape[1])[None] < counts[:, None]
    wrong = used & ((labels < 0) | (labels >= classes) | (labels == blank))
    if wrong.any():
        row, place = (int(index) for index in np.argwhere(wrong)[0])
        raise LossError(
            f"ctc needs labels from 0 to {classes - 1} other than blank={blank}. Received: {int(labels[row, place])} "
            f"at index ({row}, {place}). Padding is said with label_lengths."
        )


def _check_integers(name: str, values: Any, shape: tuple[Any, ...], axes: str) -> None:
    own = tuple(getattr(values, "shape", ()))
    fits = len(own) == len(shape) and all(
        want is None or length is None or want == length for want, length in zip(shape, own, strict=True)
    )
    if "int" not in str(getattr(values, "dtype", "")) or not fits:
        raise LossError(
            f"{name} must be integers of shape {axes}, with the batch of the logits. Received: "
            f"{describe_value(values)} of shape {own}."
        )

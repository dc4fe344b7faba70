"""Losses of sequences whose alignment with their labels is not known: connectionist temporal classification."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from polyamp.contract.registry import backend_of
from polyamp.losses.means import Reduction, reduce_values
from polyamp.results import ArrayT
from polyamp.rules.loss_argument_checks import check_alignment_shapes, check_alignment_values, check_reduction


def ctc(
    logits: ArrayT,
    labels: Any,
    *,
    logit_lengths: Any = None,
    label_lengths: Any = None,
    blank: int = 0,
    zero_infinity: bool = False,
    reduction: Reduction = "mean",
) -> ArrayT:
    """Return the connectionist temporal classification loss, in nats (Graves et al., 2006).

    The loss of a sequence is minus the logarithm of the probability of all paths that give its labels when repeated
    classes are merged and blanks are left out. It is torch's `ctc_loss` of `log_softmax(logits)`, batch first: torch
    takes log-probabilities with the steps first. As there, the mean divides each loss by its number of labels and then
    takes the mean over the sequences; optax and TensorFlow return the loss of each sequence.

    Labels that do not fit into their steps, of which each repetition needs one more, have the loss infinity, and a step
    is skipped (S12). optax gives them about 1e5 for each missing step.

    Args:
        logits: floating array, shape (sequences, steps, classes).
        labels: integers, shape (sequences, length), each a class but the blank. Padding may be any integer.
        logit_lengths: number of steps of each sequence, integers of shape (sequences,); None: all.
        label_lengths: number of labels of each sequence, likewise.
        blank: class that separates labels.
        zero_infinity: whether labels that do not fit have the loss 0 and no gradient.
        reduction: "mean" or "sum" for a scalar, "none" for shape (sequences,), both without the division.

    Raises:
        LossError: the shapes do not match, or a label or length on the host is out of range.

    >>> import numpy as np
    >>> logits = np.zeros((1, 3, 2), "f4")  # 6 of the 8 paths of 3 steps give the label 1 alone
    >>> round(float(ctc(logits, np.array([[1]]))), 4), round(float(np.log(8 / 6)), 4)
    (0.2877, 0.2877)
    """
    check_reduction(reduction)
    check_alignment_shapes(logits, labels, logit_lengths, label_lengths)
    losses = backend_of(logits).losses
    sequences, steps, classes = tuple(cast("Any", logits).shape)
    length = tuple(labels.shape)[1]
    with losses.in_float32():
        given = losses.indices(labels, logits)
        own_steps, own_labels = (
            losses.indices(np.full(sequences, longest, np.int32) if lengths is None else lengths, logits)
            for lengths, longest in ((logit_lengths, steps), (label_lengths, length))
        )
        on_host = [losses.on_host(array) for array in (given, own_steps, own_labels)]
        check_alignment_values(*on_host, steps=steps, classes=classes, blank=blank)
        widths = losses.constant(own_labels, logits)
        counted = losses.constant(np.arange(length), logits)[None, :] < widths[:, None]
        given = losses.where(counted, given, 1 if blank == 0 else 0)
        again = (given[:, 1:] == given[:, :-1]) & counted[:, 1:]
        needed = widths + losses.sum(losses.where(again, 1.0, 0.0), -1)
        fits = needed <= losses.constant(own_steps, logits)
        kept = losses.where(fits, own_labels, 0)  # of which the loss and its gradient are finite
        values = losses.ctc(losses.wide(logits, logits), given, own_steps, kept, blank)
        values = values * losses.where(fits, 1.0, 0.0 if zero_infinity else float("inf"))
        if reduction == "mean":
            values = values / losses.where(widths > 1.0, widths, 1.0)
        return reduce_values(losses, values, reduction)

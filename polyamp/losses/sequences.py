"""Losses of sequences whose alignment is not known: connectionist temporal classification (CTC)."""

from __future__ import annotations

from typing import Any, cast

from polyamp.contract.registry import backend_of
from polyamp.losses.means import Reduction, reduce_values
from polyamp.results import ArrayT
from polyamp.rules.ctc_argument_checks import check_ctc_arrays, check_ctc_labels, check_ctc_lengths
from polyamp.rules.loss_argument_checks import check_reduction


def ctc(
    logits: ArrayT,
    labels: Any,
    logit_lengths: Any = None,
    label_lengths: Any = None,
    *,
    blank: int = 0,
    zero_infinity: bool = False,
    reduction: Reduction = "mean",
) -> ArrayT:
    """Return the CTC loss of each sequence, in nats (Graves et al., 2006).

    It is minus the log of the summed probabilities of all alignments that become the labels once repeats are merged and
    blanks dropped.

    It is `torch.nn.functional.ctc_loss` of a log-softmax, batch first. As there, the mean divides each loss by its
    number of labels, at least 1, and then by the number of sequences, over micro-batches and replicas too (S8).
    `tf.nn.ctc_loss` and `optax.ctc_loss` are `reduction="none"`. All of it is float32.

    A sequence is impossible if it has fewer frames than labels and adjacent equal labels, between which a blank must
    stand. Its loss is inf and its gradients are not finite in every framework, so a step that checks gradients is
    skipped; with `zero_infinity` both are 0, and the mean still counts the sequence.

    Args:
        logits: floating array, shape (batch, frames, classes), before any softmax. torch's have the frames first.
        labels: integer array, shape (batch, length), padded with any value.
        logit_lengths: frames of each sequence, at least 1, shape (batch,); None: all.
        label_lengths: labels of each sequence, shape (batch,); None: all. 0 is a sequence of blanks.
        blank: class of the blank: 0 in torch, optax and here, the last in Keras's older code.
        zero_infinity: whether impossible sequences have the loss 0 in place of inf.
        reduction: "mean" or "sum" for a scalar, "none" for shape (batch,), the latter two without the division.

    Raises:
        LossError: the shapes do not match, a label is the blank or no class, or a length is too large. Where labels or
            lengths are on a device, such a sequence has the loss NaN.

    >>> import numpy as np
    >>> logits = np.zeros((1, 2, 3), "f4")
    >>> round(float(ctc(logits, np.array([[1]]))), 4)  # three of nine alignments: "11", "1-", "-1"
    1.0986
    >>> ctc(logits, np.array([[1, 1]]), reduction="none").tolist()  # needs "1-1"
    [inf]
    """
    check_reduction(reduction)
    check_ctc_arrays(logits, labels, logit_lengths, label_lengths, blank, zero_infinity)
    losses, rows = backend_of(logits).losses, cast("Any", logits)
    with losses.in_float32():
        x, given = losses.wide(rows, rows), losses.indices(labels, rows)
        classes = losses.classes(x)
        batch, frame, place = (losses.positions(x, 0), losses.positions(x, 1), losses.positions(given, 1))
        most = [batch * 0.0 + positions[-1] + 1.0 for positions in (frame, place)]
        sizes = [
            all_of if lengths is None else losses.constant(lengths, rows)
            for lengths, all_of in zip((logit_lengths, label_lengths), most, strict=True)
        ]
        frames, count = sizes
        for name, lengths, array in (("logit_lengths", logit_lengths, x), ("label_lengths", label_lengths, given)):
            if lengths is not None:
                check_ctc_lengths(losses.on_host(lengths), array.shape[1], name)
        used = place[None] < count[:, None]
        wrong = used & ((given < 0) | (given >= classes) | (given == blank))
        host_labels = losses.on_host(labels)
        host_counts = None if label_lengths is None else losses.on_host(label_lengths)
        if host_labels is not None and (label_lengths is None or host_counts is not None):
            check_ctc_labels(host_labels, host_counts, classes, blank)
        repeats = losses.sum(losses.where((given[:, 1:] == given[:, :-1]) & used[:, 1:], 1.0, 0.0), -1)
        outside = (frames < 1.0) | (frames > most[0]) | (count < 0.0) | (count > most[1])
        outside = outside | (losses.sum(losses.where(wrong, 1.0, 0.0), -1) > 0.0)
        impossible = count + repeats > frames
        filler = 1 if blank == 0 else 0
        values = losses.ctc(
            x,
            losses.where(used & ~wrong, given, filler),
            losses.where(outside, most[0], frames),
            losses.where(outside | impossible, batch * 0.0, count),  # a possible one in its place
            blank,
        )
        if zero_infinity:
            values = losses.where(~impossible, values, 0.0)
        else:
            values = values * losses.where(impossible, float("inf"), 1.0)  # the gradients, too
        values = values * losses.where(outside, float("nan"), 1.0)
        if reduction == "mean":
            values = values / losses.where(count > 1.0, count, 1.0)
        return reduce_values(losses, values, reduction)

"""Losses of pairs of embeddings: the contrastive loss of CLIP."""

from __future__ import annotations

from typing import Any, cast

from polyamp.contract.backend import LossFunctions
from polyamp.contract.registry import backend_of
from polyamp.errors import LossError
from polyamp.losses.means import Reduction, reduce_values
from polyamp.results import ArrayT
from polyamp.rules.loss_argument_checks import check_loss_pair, check_reduction


def contrastive(
    first: ArrayT, second: Any, log_scale: Any, *, normalize: bool = True, reduction: Reduction = "mean"
) -> ArrayT:
    """Return the symmetric contrastive loss of pairs with a learned temperature, in nats (CLIP, Radford et al., 2021).

    Row i of both arrays is a pair. With the rows a and b at length 1 and logits `exp(log_scale) * a @ b.T`, the loss of
    pair i is half the cross-entropy of row i of the logits with class i and half that of column i: the symmetric
    InfoNCE. It is the loss of transformers' `CLIPModel`. All of it is float32, the products too.

    The negatives of a pair are the other pairs of its micro-batch and its replica: the loss of two micro-batches is the
    mean of two losses and not that of one batch, in every framework (S8). `accumulate_steps` does not give more
    negatives; gather the embeddings first for negatives from all replicas.

    Args:
        first: floating array, shape (pairs, width): images.
        second: floating array of the same shape: texts.
        log_scale: the logarithm of 1 / temperature, a learned scalar or a number: the parameter `logit_scale` of CLIP,
            `math.log(1 / 0.07)` at first. (open_clip's `ClipLoss` takes the exponential of it.) CLIP keeps it below
            `math.log(100)` by clamping the parameter after each update.
        normalize: whether the rows are divided by their lengths; False for rows of length 1. A row of zeros stays.
        reduction: "mean" or "sum" for a scalar, "none" for shape (pairs,).

    Raises:
        LossError: the shapes do not match or have not two axes, or log_scale is not a scalar.

    >>> import numpy as np
    >>> images, texts = np.eye(3, dtype="f4"), np.eye(3, dtype="f4")
    >>> round(float(contrastive(images, texts, 0.0)), 4), round(float(contrastive(images, texts, 2.0)), 4)
    (0.5514, 0.0012)
    """
    check_reduction(reduction)
    check_loss_pair(first, second, what="contrastive")
    shape = tuple(cast("Any", first).shape)
    if len(shape) != 2:
        raise LossError(f"contrastive needs embeddings of shape (pairs, width). Received shape: {shape}.")
    if tuple(getattr(log_scale, "shape", ())) != ():
        raise LossError(f"log_scale must be a number or a scalar. Received shape: {tuple(log_scale.shape)}.")
    losses = backend_of(first).losses
    with losses.in_float32():
        one, other = (losses.wide(array, first) for array in (first, second))
        if normalize:
            one, other = (array * _inverse_lengths(losses, array)[..., None] for array in (one, other))
        scale = losses.exp(losses.wide(log_scale, first))
        costs = [
            -losses.diagonal(losses.log_softmax(scale * losses.linear(*pair, None, "float32")))
            for pair in ((one, other), (other, one))
        ]
        return reduce_values(losses, 0.5 * (costs[0] + costs[1]), reduction)


def _inverse_lengths(losses: LossFunctions, rows: Any) -> Any:
    """Return 1 / |row|; 1 for a row of zeros."""
    squares = losses.sum(rows * rows, -1)
    return losses.where(losses.constant(squares, squares) > 0.0, squares, 1.0) ** -0.5

"""Losses of causal language models: next-token cross-entropy with z-loss, of logits, or of hidden states in chunks."""

from __future__ import annotations

from typing import Any, cast

from polyamp.contract.backend import LossFunctions
from polyamp.contract.registry import backend_of
from polyamp.float_formats import canonical_dtype
from polyamp.losses.classification import label_rows
from polyamp.losses.means import COUNT_LINES, Reduction, quotient, reduce_values
from polyamp.results import ArrayT
from polyamp.rules.loss_argument_checks import (
    check_chunks,
    check_head,
    check_ignore_index,
    check_label_range,
    check_reduction,
    check_shift,
    check_tokens,
    check_z_loss,
)


def causal_language_model(
    logits: ArrayT,
    tokens: Any,
    *,
    ignore_index: int | None = None,
    z_loss: float = 0.0,
    shift: bool = True,
    reduction: Reduction = "mean",
) -> ArrayT:
    """Return the cross-entropy of each next token, in nats, with PaLM's z-loss.

    With logits x of a position and the token y that follows it, the position's loss is
    `log Z - x[y] + z_loss * (log Z)^2` with `Z = sum(exp(x))`. The mean divides by the positions that are not ignored,
    after the shift; it is NaN if there is none, with gradients of 0. Over micro-batches and replicas it is the mean
    over all tokens (S8).

    It is transformers' `ForCausalLMLoss`, which shifts and has `ignore_index=-100`, and MaxText's and T5X's
    cross-entropy with `z_loss`, which are given shifted targets. The z-loss is that of PaLM (Chowdhery et al., 2022,
    section 5, with 1e-4).

    Args:
        logits: floating array, shape (..., length, vocabulary).
        tokens: integer array, shape (..., length): the input tokens, or labels (a copy in which tokens that do not
            count are `ignore_index`).
        ignore_index: a token that does not count as a target; default None, not torch's -100. It is compared with the
            target, so a padding token must not be a token that the model has to learn, such as the end of a text.
        z_loss: factor of the z-loss, at least 0.
        shift: True where position i of the logits predicts token i + 1 of the same row: the first token and the last
            position do not count. False where `tokens` are targets that the data pipeline has shifted.
        reduction: "mean" or "sum" for a scalar, "none" for shape (..., length - 1) with `shift`, else (..., length),
            with 0 for ignored positions.

    Raises:
        LossError: tokens that do not match the logits, a token outside of the vocabulary, a row without a next token,
            or an impossible argument.

    >>> import numpy as np
    >>> logits = np.array([[[0.0, 2.0], [1.0, 0.0], [5.0, 5.0]]], "f4")
    >>> causal_language_model(logits, np.array([[0, 1, -100]]), ignore_index=-100, reduction="none").round(4).tolist()
    [[0.12690000236034393, 0.0]]
    >>> round(float(causal_language_model(logits, np.array([[0, 1, -100]]), ignore_index=-100)), 4)
    0.1269
    >>> round(float(causal_language_model(logits, np.array([[0, 1, -100]]), ignore_index=-100, z_loss=0.1)), 4)
    0.5793
    """
    losses, positions = backend_of(logits).losses, cast("Any", logits)
    check_tokens(positions.shape[:-1], tokens, "logits", "(..., length, vocabulary)")
    _check_options(tokens, ignore_index, z_loss, shift, reduction)
    if shift:
        positions, tokens = positions[..., :-1, :], tokens[..., 1:]
    with losses.in_float32():
        on_host = losses.on_host(tokens)
        if on_host is not None:
            check_label_range(on_host, losses.classes(positions), ignore_index, what="causal_language_model")
        given = losses.indices(tokens, positions)
        rows, shares = label_rows(losses, positions, given, on_host is None, ignore_index, z_loss=z_loss)
        return _reduce_positions(losses, rows, shares, shift, reduction)


def chunked_causal_language_model(
    hidden: ArrayT,
    weight: Any,
    tokens: Any,
    *,
    bias: Any = None,
    chunks: int = 8,
    dtype: str | None = None,
    ignore_index: int | None = None,
    z_loss: float = 0.0,
    shift: bool = True,
    reduction: Reduction = "mean",
) -> ArrayT:
    """Return `causal_language_model` of `hidden @ weight.T + bias` without ever holding all logits.

    The positions of every row are cut into `chunks` parts. The logits of one part exist at a time; the backward pass
    computes them again, which costs one more product with the head. Value and gradients are those of the whole form to
    rounding: the gradient of the weight is summed over the chunks in float32. A loss scale multiplies the logits'
    gradients before they are rounded, as in the whole form, so float16 works as usual.

    It is torchtune's `LinearCrossEntropyLoss` (`num_output_chunks=8`) and Liger's and Apple's fused linear
    cross-entropy. Their kernels are faster on a GPU; this one is the framework's own operations on every device.
    For 250 MB of logits 8 chunks take 97 MB instead of 714 MB in torch, 162 instead of 771 in JAX and 172 instead of
    518 in TensorFlow (docs/measurements/chunked_loss.md).

    Args:
        hidden: what the head receives, floating, shape (..., length, width).
        weight: the head's weight, shape (vocabulary, width): torch's `Linear.weight`, or a tied embedding table in
            every framework. A kernel of Keras or flax is its transpose, `kernel.T` or `tf.transpose(kernel)`. Under
            `fully_shard` the weight is whole only in the model's forward pass: call the loss there.
        tokens: integer array, shape (..., length).
        bias: the head's bias, shape (vocabulary,), or None.
        chunks: number of parts, at least 1; rows shorter than that are cut into single positions.
        dtype: dtype of the product, such as `recipe.policy.compute`. None is that of a product at this place: the
            compute dtype in a region of autocast (torch's `loss_fn`, a forward pass under a policy), elsewhere the
            dtype of `hidden`.
        ignore_index: see `causal_language_model`.
        z_loss: see `causal_language_model`.
        shift: see `causal_language_model`.
        reduction: see `causal_language_model`.

    Raises:
        LossError: as for `causal_language_model`; or weight, bias or chunks do not fit.
        PolicyError: the dtype is unknown.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> hidden, weight = rng.normal(size=(2, 5, 3)).astype("f4"), rng.normal(size=(7, 3)).astype("f4")
    >>> tokens = rng.integers(0, 7, (2, 5))
    >>> round(float(chunked_causal_language_model(hidden, weight, tokens, chunks=2)), 4)
    2.1032
    >>> round(float(causal_language_model(hidden @ weight.T, tokens)), 4)
    2.1032
    """
    losses, positions = backend_of(hidden).losses, cast("Any", hidden)
    check_tokens(positions.shape[:-1], tokens, "hidden", "(..., length, width)")
    check_head(positions, weight, bias)
    check_chunks(chunks)
    dtype = None if dtype is None else canonical_dtype(dtype, argument="dtype")
    _check_options(tokens, ignore_index, z_loss, shift, reduction)
    if shift:
        positions, tokens = positions[..., :-1, :], tokens[..., 1:]
    on_host = losses.on_host(tokens)
    if on_host is not None:
        check_label_range(on_host, int(weight.shape[0]), ignore_index, what="chunked_causal_language_model")
    unchecked = on_host is None

    def chunk_rows(hidden: Any, tokens: Any, weight: Any, bias: Any = None) -> Any:
        logits = losses.linear(hidden, weight, bias, dtype)
        with losses.in_float32():
            return label_rows(losses, logits, tokens, unchecked, ignore_index, z_loss=z_loss)[0]

    given = losses.indices(tokens, positions)
    shared = (weight,) if bias is None else (weight, bias)
    rows = losses.map_chunks(chunk_rows, (positions, given), shared, len(tokens.shape) - 1, chunks)
    with losses.in_float32():
        shares = None if ignore_index is None else losses.where(given != ignore_index, 1.0, 0.0)
        return _reduce_positions(losses, rows, shares, shift, reduction)


def _check_options(tokens: Any, ignore_index: int | None, z_loss: float, shift: bool, reduction: str) -> None:
    check_reduction(reduction)
    check_ignore_index(ignore_index, soft=False)
    check_z_loss(z_loss)
    if shift:
        check_shift(tokens)


def _reduce_positions(losses: LossFunctions, rows: Any, shares: Any, shift: bool, reduction: str) -> Any:
    """Return the losses of the positions, reduced; `shares` is the weight of each, None if each counts."""
    if reduction == "mean" and shares is not None:
        line = COUNT_LINES["next tokens" if shift else "tokens"]
        return quotient(losses, losses.sum(rows), losses.sum(shares), tuple(rows.shape), line)
    return reduce_values(losses, rows, reduction)

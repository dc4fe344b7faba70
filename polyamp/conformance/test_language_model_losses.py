"""Rule S24: next-token cross-entropy with z-loss, of logits and of hidden states in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

import polyamp
from polyamp.conformance.loss_problems import logits_gradient, logits_state, numeric_gradient
from polyamp.conformance.problems import Array, changed_arrays, recipe, to_float
from polyamp.contract.harness import DenseWeights, Harness
from polyamp.errors import LossError

if TYPE_CHECKING:
    from polyamp.contract.backend import Backend

RNG: Final = np.random.default_rng(7)
LOGITS: Final = RNG.normal(0.0, 2.0, (6, 4)).astype(np.float32)
TOKENS: Final = np.array([2, 0, 1, -100, 3, 2], np.int64)
HIDDEN: Final = RNG.normal(0.0, 1.0, (6, 3)).astype(np.float32)
WEIGHT: Final = RNG.normal(0.0, 1.0, (6, 3)).astype(np.float32)
BIAS: Final = RNG.normal(0.0, 1.0, (6, 1)).astype(np.float32)
IGNORED: Final[dict[str, Any]] = {"ignore_index": -100}
SETTINGS: Final[list[dict[str, Any]]] = [
    IGNORED,
    {**IGNORED, "z_loss": 0.01},
    {**IGNORED, "z_loss": 0.01, "shift": False},
    {**IGNORED, "reduction": "sum"},
]
LOSSES: Final[Any] = polyamp.losses  # called with what its types forbid


def language_model(
    logits: Array,
    tokens: Array,
    *,
    ignore_index: int | None = None,
    z_loss: float = 0.0,
    shift: bool = True,
    reduction: str = "mean",
) -> Any:
    """The formula in float64, one position after the other."""
    rows = []
    sequences = zip(logits.reshape(-1, *logits.shape[-2:]), tokens.reshape(-1, tokens.shape[-1]), strict=True)
    counted = 0
    for positions, targets in sequences:
        for row, token in zip(positions.astype(np.float64), targets[1:] if shift else targets, strict=not shift):
            log_z = row.max() + np.log(np.exp(row - row.max()).sum())
            rows.append(0.0 if token == ignore_index else log_z - row[token] + z_loss * log_z**2)
            counted += token != ignore_index
    if reduction == "none":
        return np.array(rows).reshape(*tokens.shape[:-1], -1)
    return sum(rows) / counted if reduction == "mean" else sum(rows)


def head_state(harness: Harness, made: polyamp.Recipe) -> Any:
    """A model whose outputs for the rows of the identity are the hidden states and the weight and bias of a head."""
    kernels = (HIDDEN, WEIGHT, BIAS)
    return polyamp.init(harness.branches([DenseWeights(k, np.zeros(k.shape[1], np.float32)) for k in kernels]), made)


def head_gradients(backend: Backend, gradients: polyamp.Gradients) -> Array:
    """The gradients of the three kernels of `head_state`, side by side."""
    found = [backend.to_numpy(gradient) for _, gradient in backend.named_gradients(gradients)]
    kernels = [value for value in found if value.ndim == 2]
    return np.concatenate([k if k.shape[0] == 6 else k.T for k in kernels], axis=1).astype(np.float64)


def head_loss(whole: Array, tokens: Array, **options: Any) -> Any:
    """The loss of the three kernels of `head_state`, side by side."""
    return language_model(whole[:, :3] @ whole[:, 3:6].T + whole[:, 6], tokens, **options)


WHOLE: Final = np.concatenate([HIDDEN, WEIGHT, BIAS], axis=1)


def chunked(model: Any, batch: Any, **options: Any) -> Any:
    hidden, weight, bias = model(batch["x"])
    return polyamp.losses.chunked_causal_language_model(hidden, weight, batch["tokens"], bias=bias[:, 0], **options)


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_s24_causal_language_model_has_its_formula_and_gradient(
    backend: Backend, harness: Harness, options: Any
) -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        return polyamp.losses.causal_language_model(model(batch["x"]), batch["tokens"], **options)

    state = logits_state(harness, LOGITS, recipe())
    loss, gradients = polyamp.value_and_grad(loss_fn)(state, {"x": np.eye(6, dtype=np.float32), "tokens": TOKENS})
    assert backend.to_numpy(loss).dtype == np.float32
    np.testing.assert_allclose(to_float(backend, loss), language_model(LOGITS, TOKENS, **options), rtol=2e-6)
    want = numeric_gradient(lambda at: language_model(at, TOKENS, **options), LOGITS.astype(np.float64))
    found = logits_gradient(backend, gradients, LOGITS.shape)
    np.testing.assert_allclose(found, want, rtol=0, atol=2e-6 * np.abs(want).max())
    ignored = [3] if "shift" in options else [2, 5]  # without a next token, or with an ignored one
    assert not found[ignored].any()


def test_s24_language_model_losses_of_several_rows(backend: Backend, harness: Harness) -> None:
    """Each row is shifted by itself; chunks of any number cut the same positions; the mean counts what is left."""
    logits, tokens = RNG.normal(size=(2, 5, 4)).astype(np.float32), RNG.integers(0, 4, (2, 5))
    tokens[1, 2:] = -100
    hidden, weight = RNG.normal(size=(2, 5, 3)).astype(np.float32), RNG.normal(size=(4, 3)).astype(np.float32)
    for options in ({}, {"z_loss": 0.1}, {"shift": False}, {"reduction": "none"}):
        want = language_model(logits, tokens, **IGNORED, **options)
        got = polyamp.losses.causal_language_model(harness.array(logits), harness.array(tokens), **IGNORED, **options)
        np.testing.assert_allclose(backend.to_numpy(got), want, rtol=2e-6)
        want = language_model(hidden @ weight.T, tokens, **IGNORED, **options)
        for chunks in (1, 2, 3, 8):
            got = polyamp.losses.chunked_causal_language_model(
                harness.array(hidden), harness.array(weight), tokens, chunks=chunks, **IGNORED, **options
            )
            np.testing.assert_allclose(backend.to_numpy(got), want, rtol=2e-6, err_msg=f"{chunks} {options}")


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_s24_chunks_have_the_value_and_gradients_of_the_whole(backend: Backend, harness: Harness, options: Any) -> None:
    """Of hidden states, weight and bias; six positions, of which the last of the four parts is shorter."""
    given = {"x": np.eye(6, dtype=np.float32), "tokens": np.where(TOKENS == 2, 5, TOKENS)}
    state = head_state(harness, recipe())
    loss, gradients = polyamp.value_and_grad(lambda model, batch: chunked(model, batch, chunks=4, **options))(
        state, given
    )
    np.testing.assert_allclose(to_float(backend, loss), head_loss(WHOLE, given["tokens"], **options), rtol=2e-6)
    want = numeric_gradient(lambda at: head_loss(at, given["tokens"], **options), WHOLE.astype(np.float64))
    np.testing.assert_allclose(head_gradients(backend, gradients), want, rtol=0, atol=3e-6 * np.abs(want).max())


def test_s08_chunks_over_micro_batches_count_their_tokens(backend: Backend, harness: Harness) -> None:
    """Micro-batches with 4 and with 1 next token, and the mean of all 5."""
    few = np.where(np.arange(6) == 1, TOKENS, -100)
    batches = [{"x": np.eye(6, dtype=np.float32), "tokens": tokens} for tokens in (TOKENS, few)]
    made = recipe(optimizer=polyamp.sgd(1.0), accumulate_steps=2)
    _, result = polyamp.train_step(lambda model, batch: chunked(model, batch, chunks=2, **IGNORED), made)(
        head_state(harness, made), batches
    )
    total = [head_loss(WHOLE, tokens, reduction="sum", **IGNORED) for tokens in (TOKENS, few)]
    np.testing.assert_allclose(to_float(backend, result.loss), sum(total) / 5.0, rtol=2e-6)
    assert to_float(backend, result.weight) == 5.0


def test_s24_the_loss_scale_reaches_the_product_of_the_head(backend: Backend, harness: Harness) -> None:
    """Gradients of logits below float16's smallest number: lost where they are rounded before they are scaled."""

    def loss_fn(model: Any, batch: Any) -> Any:
        return 1e-8 * chunked(model, batch, chunks=2, dtype="float16", **IGNORED)

    given = {"x": np.eye(6, dtype=np.float32), "tokens": TOKENS}
    want = 1e-8 * numeric_gradient(lambda at: head_loss(at, TOKENS, **IGNORED), WHOLE.astype(np.float64))
    found = []
    for scale in (1.0, 2.0**24):
        made = recipe(polyamp.Policy("float32"), scaler=polyamp.LossScaler.static(scale))
        _, gradients = polyamp.value_and_grad(loss_fn)(head_state(harness, made), given)
        found.append(head_gradients(backend, gradients))
    assert np.abs(found[0][:, :6]).max() == 0.0
    np.testing.assert_allclose(found[1], want, rtol=0, atol=4e-3 * np.abs(want).max())


def test_s24_a_token_outside_of_the_vocabulary_is_never_another(backend: Backend, harness: Harness) -> None:
    """On the host it is refused; a traced step gives NaN, in the gradient too, so that nothing is applied."""
    tokens = np.array([2, 0, 1, 6, 3, 2])
    said = r"labels from 0 to 5, .* of 6 classes\. Received: 6 at index \(2,\); of 5 labels 1 are outside"
    with pytest.raises(LossError, match=f"chunked_causal_language_model needs {said}"):
        polyamp.losses.chunked_causal_language_model(harness.array(HIDDEN), harness.array(WEIGHT), tokens)
    made = recipe(scaler=polyamp.LossScaler(init_scale=8.0))
    state = head_state(harness, made)
    before = backend.export_state(state)
    try:
        state, result = polyamp.train_step(lambda model, batch: chunked(model, batch, chunks=2), made)(
            state, {"x": np.eye(6, dtype=np.float32), "tokens": tokens}
        )
        assert bool(backend.to_numpy(result.skipped))
    except LossError:  # a step that is not compiled sees the values
        pass
    assert changed_arrays(before, backend.export_state(state)) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: LOSSES.causal_language_model(x, TOKENS[:4]), r"of shape \(6,\), one .* of logits, .*\(4,\)"),
        (lambda x, w: LOSSES.causal_language_model(x, [1, 2, 3, 4, 5, 6]), "must be integers .* Received: list"),
        (lambda x, w: LOSSES.causal_language_model(x, TOKENS.astype("f4")), r"Received: float32 of shape \(6,\)"),
        (lambda x, w: LOSSES.causal_language_model(x[:1], TOKENS[:1]), r"at least 2 tokens.* give shift=False"),
        (lambda x, w: LOSSES.causal_language_model(x, TOKENS, z_loss=-1.0), r"z_loss must be .* Received: z_loss=-1.0"),
        (lambda x, w: LOSSES.causal_language_model(x, TOKENS), r"Received: -100 at index \(2,\).* ignore_index=-100"),
        (lambda x, w: LOSSES.chunked_causal_language_model(x, w, TOKENS, chunks=0), r"chunks must be .*: chunks=0"),
        (lambda x, w: LOSSES.chunked_causal_language_model(x, w[:, :1], TOKENS), r"of hidden, 3\. .*: \(6, 1\)\.$"),
        (lambda x, w: LOSSES.chunked_causal_language_model(x, w[:3, :2], TOKENS), r": \(3, 2\)\. .* transpose\."),
        (lambda x, w: LOSSES.chunked_causal_language_model(x, w, TOKENS, bias=w[0]), r"shape \(6,\)\. .*: \(3,\)\."),
    ],
)  # fmt: skip
def test_s24_language_model_losses_refuse_what_does_not_fit(harness: Harness, call: Any, message: str) -> None:
    with pytest.raises(LossError, match=message):
        call(harness.array(HIDDEN), harness.array(WEIGHT))

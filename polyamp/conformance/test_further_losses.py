"""Rule S24: focal loss, divergence with a temperature, contrastive loss: formulas, gradients and traps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

import polyamp
from polyamp.conformance.loss_problems import numeric_gradient
from polyamp.conformance.problems import Array, recipe, to_float
from polyamp.contract.harness import DenseWeights, Harness
from polyamp.errors import LossError

if TYPE_CHECKING:
    from polyamp.contract.backend import Backend

RNG: Final = np.random.default_rng(11)
X: Final = RNG.normal(0.0, 2.0, (6, 4)).astype(np.float32)
Y: Final = RNG.normal(0.0, 2.0, (6, 4)).astype(np.float32)
SCALE: Final = np.full((6, 1), math.log(1.0 / 0.07), np.float32)
HARD: Final = (RNG.random((6, 4)) < 0.3).astype(np.float32)
SOFT: Final = RNG.random((6, 4)).astype(np.float32)
ROWS: Final = np.array([1.0, 0.0, 2.0, 1.0, 0.5, 0.0], np.float32)
LOSSES: Final[Any] = polyamp.losses  # called with what its types forbid


def focal(x: Array, t: Array, gamma: float, alpha: float | None) -> Any:
    """The loss of each element."""
    p = 1.0 / (1.0 + np.exp(-x))
    cost = np.logaddexp(0.0, x) - x * t
    weight = 1.0 if alpha is None else alpha * t + (1 - alpha) * (1 - t)
    return weight * (p * (1 - t) + (1 - p) * t) ** gamma * cost


def log_softmax(x: Array) -> Array:
    shifted = x - x.max(-1, keepdims=True)
    found: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found


def divergence(x: Array, y: Array, temperature: float) -> Any:
    """The loss of each row."""
    q, p = log_softmax(x / temperature), log_softmax(y / temperature)
    return temperature**2 * (np.exp(p) * (p - q)).sum(-1)


def contrastive(x: Array, y: Array, log_scale: Any, *, normalize: bool = True) -> Any:
    """The loss of each pair."""
    if normalize:
        x, y = (each / np.linalg.norm(each, axis=-1, keepdims=True) for each in (x, y))
    logits = np.exp(log_scale) * x @ y.T
    return -0.5 * (np.diag(log_softmax(logits)) + np.diag(log_softmax(logits.T)))


CASES: Final[dict[str, tuple[Any, Any]]] = {
    "focal": (
        lambda x, y, s: polyamp.losses.sigmoid_focal(x, HARD) + polyamp.losses.sigmoid_focal(y, SOFT, gamma=0.5),
        lambda x, y, s: focal(x, HARD, 2.0, 0.25).mean() + focal(y, SOFT, 0.5, 0.25).mean(),
    ),
    "focal weights": (
        lambda x, y, s: polyamp.losses.sigmoid_focal(x, HARD, gamma=0.0, alpha=None, weights=ROWS[:, None]),
        lambda x, y, s: (focal(x, HARD, 0.0, None) * ROWS[:, None]).mean(),
    ),
    "divergence": (
        lambda x, y, s: polyamp.losses.kl_divergence(x, y, temperature=3.0),
        lambda x, y, s: divergence(x, y, 3.0).mean(),
    ),
    "divergence weights": (
        lambda x, y, s: polyamp.losses.kl_divergence(x, y, weights=ROWS),
        lambda x, y, s: (divergence(x, y, 1.0) * ROWS).sum() / ROWS.sum(),
    ),
    "contrastive": (
        lambda x, y, s: polyamp.losses.contrastive(x, y, s[0, 0]),
        lambda x, y, s: contrastive(x, y, s[0, 0]).mean(),
    ),
    "contrastive sum": (
        lambda x, y, s: polyamp.losses.contrastive(x, y, 0.1, normalize=False, reduction="sum"),
        lambda x, y, s: contrastive(x, y, 0.1, normalize=False).sum(),
    ),
}
"""Name -> the loss of three arrays of the framework, and its formula in float64."""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("policy", "digits"), [("float32", 3e-6), ("bfloat16", 8e-3)])
def test_s24_further_losses_have_their_formulas_and_gradients(
    backend: Backend, harness: Harness, name: str, policy: str, digits: float
) -> None:
    """The three arrays are outputs of a model, so of the policy's dtype; inside a loss all is float32."""
    loss, formula = CASES[name]
    kernels = (X, Y, SCALE)
    made = recipe(polyamp.Policy(compute=policy, output=policy), scaler=polyamp.LossScaler.off())
    state = polyamp.init(harness.branches([DenseWeights(k, np.zeros(k.shape[1], "f4")) for k in kernels]), made)
    found, gradients = polyamp.value_and_grad(lambda model, batch: loss(*model(batch)))(state, np.eye(6, dtype="f4"))
    assert backend.to_numpy(found).dtype == np.float32
    seen = np.concatenate([backend.to_numpy(backend.cast(harness.array(k), policy)) for k in kernels], 1).astype("f8")

    def whole(at: Array) -> Any:
        return formula(at[:, :4], at[:, 4:8], at[:, 8:])

    np.testing.assert_allclose(to_float(backend, found), whole(seen), rtol=3e-6)
    want, got = numeric_gradient(whole, seen), np.zeros((6, 9))
    for path, gradient in backend.named_gradients(gradients):
        if gradient is not None and len(gradient.shape) == 2:
            first = 4 * int(path.partition("dense")[2][0])
            kernel = backend.to_numpy(gradient)
            got[:, first : first + 4] = kernel if len(kernel) == 6 else kernel.T  # torch keeps (out, in)
    np.testing.assert_allclose(got, want, rtol=0, atol=digits * np.abs(want).max())


def test_s24_a_focal_loss_is_finite_where_a_probability_rounds_to_one(backend: Backend, harness: Harness) -> None:
    """The derivative of (1 - p)^0.5 is infinite at 0, to which 1 - sigmoid(x) rounds from x = 17 on."""
    state = polyamp.init(harness.mlp([DenseWeights(np.eye(4, dtype="f4"), np.zeros(4, "f4"))]), recipe())
    x, t = np.array([[20.0, -20.0, 200.0, -200.0]], "f4"), np.array([[1.0, 0.0, 1.0, 1.0]], "f4")

    def loss_fn(model: Any, batch: Any) -> Any:
        logits = model(batch)
        loss = polyamp.losses.sigmoid_focal(logits, t, gamma=0.5, alpha=None, reduction="sum")
        return loss, polyamp.losses.sigmoid_focal(logits, t, gamma=0.5, alpha=None, reduction="none")

    (_, rows), gradients = polyamp.value_and_grad(loss_fn)(state, x)
    found = backend.to_numpy(rows)[0]
    np.testing.assert_allclose(found, [0.0, 0.0, 0.0, 200.0], rtol=1e-6, atol=1e-9)
    for _, gradient in backend.named_gradients(gradients):
        assert np.isfinite(backend.to_numpy(gradient)).all()


def test_s24_classes_that_both_rule_out_add_nothing_to_a_divergence(backend: Backend, harness: Harness) -> None:
    """-inf minus -inf is NaN, and so is 0 times it."""
    masked = np.array([[0.0, 0.0, 0.0, -np.inf]], np.float32)
    state = polyamp.init(harness.mlp([DenseWeights(X[:1, :4].repeat(4, 0), np.zeros(4, "f4"))]), recipe())

    def loss_fn(model: Any, batch: Any) -> Any:
        return polyamp.losses.kl_divergence(model(batch["x"]) + batch["mask"], Y[:1] + masked)

    loss, gradients = polyamp.value_and_grad(loss_fn)(state, {"x": np.eye(4, dtype="f4")[:1], "mask": masked})
    np.testing.assert_allclose(to_float(backend, loss), divergence(X[:1, :3], Y[:1, :3], 1.0)[0], rtol=3e-6)
    assert all(np.isfinite(backend.to_numpy(gradient)).all() for _, gradient in backend.named_gradients(gradients))


def test_s24_a_contrastive_loss_takes_a_row_of_zeros_and_keeps_small_losses(backend: Backend, harness: Harness) -> None:
    zeros = np.where(np.arange(6)[:, None] == 2, 0.0, X).astype(np.float32)
    got = polyamp.losses.contrastive(harness.array(zeros), harness.array(Y), 1.0, reduction="none")
    lengths = np.where(np.arange(6) == 2, 1.0, np.linalg.norm(zeros.astype("f8"), axis=1))[:, None]
    want = contrastive(zeros / lengths, Y / np.linalg.norm(Y.astype("f8"), axis=1)[:, None], 1.0, normalize=False)
    np.testing.assert_allclose(backend.to_numpy(got), want, rtol=3e-6)
    one = harness.array(np.eye(3, dtype=np.float32))
    small = to_float(backend, polyamp.losses.contrastive(one, one, math.log(10.0)))
    np.testing.assert_allclose(small, math.log1p(2.0 * math.exp(-10.0)), rtol=4e-3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: LOSSES.sigmoid_focal(x, x, gamma=-1.0), "gamma of at least 0. Received: gamma=-1.0"),
        (lambda x: LOSSES.sigmoid_focal(x, x, alpha=2.0), r"alpha in \[0, 1\] or None. Received: alpha=2.0"),
        (lambda x: LOSSES.kl_divergence(x, x, temperature=0.0), "temperature above 0. Received: temperature=0.0"),
        (lambda x: LOSSES.kl_divergence(x, x[:1]), r"^kl_divergence needs .* Received: \(6, 4\) and \(1, 4\)"),
        (lambda x: LOSSES.kl_divergence(x, x, weights=np.ones((6, 4), "f4")), r"shape of the predictions, \(6,\)"),
        (lambda x: LOSSES.contrastive(x[0], x[0], 1.0), r"shape \(pairs, width\). Received shape: \(4,\)"),
        (lambda x: LOSSES.contrastive(x, x, np.ones(1, "f4")), r"number or a scalar. Received shape: \(1,\)"),
    ],
)  # fmt: skip
def test_s24_further_losses_refuse_what_does_not_fit(harness: Harness, call: Any, message: str) -> None:
    with pytest.raises(LossError, match=message):
        call(harness.array(X))

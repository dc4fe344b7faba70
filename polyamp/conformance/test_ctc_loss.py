"""Rule S24: the CTC loss against all alignments counted one by one, its gradients, and impossible sequences."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

import polyamp
from polyamp.conformance.loss_problems import logits_gradient, logits_state, numeric_gradient
from polyamp.conformance.problems import Array, recipe, to_float
from polyamp.contract.harness import Harness
from polyamp.errors import LossError

if TYPE_CHECKING:
    from polyamp.contract.backend import Backend

RNG: Final = np.random.default_rng(5)
BATCH: Final = RNG.normal(0.0, 2.0, (5, 5, 3)).astype(np.float32)
LABELS: Final = np.array([[1, 2, 1], [2, 2, -7], [1, 1, 1], [2, -1, 99], [0, 0, 0]], np.int32)
FRAMES: Final = np.array([5, 3, 5, 4, 5], np.int32)
COUNTS: Final = np.array([3, 2, 3, 1, 0], np.int32)
LOSSES: Final[Any] = polyamp.losses  # called with what its types forbid


def all_alignments(x: Array, labels: Any, blank: int = 0) -> float:
    """The loss of one sequence of shape (frames, classes), float64."""
    shares = np.exp(x - x.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    total = 0.0
    for path in itertools.product(range(x.shape[1]), repeat=len(x)):
        merged = [kind for kind, _ in itertools.groupby(path) if kind != blank]
        if merged == [int(label) for label in labels]:
            total += float(np.prod(shares[np.arange(len(x)), path]))
    return -float(np.log(total))


def test_s24_a_ctc_loss_sums_all_alignments(backend: Backend, harness: Harness) -> None:
    """Lengths, repeats, padding of any value, an empty sequence; the last class as blank."""
    x = harness.array(BATCH)
    want = [all_alignments(BATCH[n, : FRAMES[n]].astype("f8"), LABELS[n, : COUNTS[n]]) for n in range(5)]
    got = polyamp.losses.ctc(x, LABELS, FRAMES, COUNTS, reduction="none")
    np.testing.assert_allclose(backend.to_numpy(got), want, rtol=3e-6)
    assert backend.to_numpy(got).dtype == np.float32
    mean = to_float(backend, polyamp.losses.ctc(x, LABELS, FRAMES, COUNTS))
    np.testing.assert_allclose(mean, np.mean(want / np.maximum(COUNTS, 1)), rtol=3e-6)
    last = [all_alignments(BATCH[n].astype("f8"), [0, 1], blank=2) for n in range(5)]
    rows = np.array([[0, 1]] * 5)
    np.testing.assert_allclose(
        backend.to_numpy(polyamp.losses.ctc(x, rows, blank=2, reduction="none")), last, rtol=3e-6
    )


@pytest.mark.parametrize(("policy", "digits"), [("float32", 3e-6), ("bfloat16", 8e-3)])
def test_s24_a_ctc_loss_has_its_gradients(backend: Backend, harness: Harness, policy: str, digits: float) -> None:
    kernel = BATCH[:2].reshape(10, 3)[:8]
    made = recipe(polyamp.Policy(compute=policy, output=policy), scaler=polyamp.LossScaler.off())
    state = logits_state(harness, kernel, made)
    pairs = ((slice(0, 4), [1, 2]), (slice(4, 8), [2, 2]))

    def loss_fn(model: Any, batch: Any) -> Any:
        out = model(batch)
        first, second = (
            polyamp.losses.ctc(out[rows][None], np.array([labels]), reduction="sum") for rows, labels in pairs
        )
        return first + second

    loss, gradients = polyamp.value_and_grad(loss_fn)(state, np.eye(8, dtype="f4"))
    seen = backend.to_numpy(backend.cast(harness.array(kernel), policy)).astype("f8")

    def whole(at: Array) -> float:
        return sum(all_alignments(at[rows], labels) for rows, labels in pairs)

    np.testing.assert_allclose(to_float(backend, loss), whole(seen), rtol=3e-6)
    want = numeric_gradient(whole, seen)
    got = logits_gradient(backend, gradients, kernel.shape)
    np.testing.assert_allclose(got, want, rtol=0, atol=digits * np.abs(want).max())


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_s24_an_impossible_alignment_skips_the_step_or_counts_as_zero(
    backend: Backend, harness: Harness, zero_infinity: bool
) -> None:
    """Three equal labels need five frames."""
    kernel = BATCH[0, :4]
    made = recipe(optimizer=polyamp.sgd(0.1), scaler=polyamp.LossScaler.off(check_finite=True))
    state = logits_state(harness, kernel, made)

    def loss_fn(model: Any, batch: Any) -> Any:
        return polyamp.losses.ctc(model(batch)[None], np.array([[1, 1, 1]]), zero_infinity=zero_infinity)

    loss, gradients = polyamp.value_and_grad(loss_fn)(state, np.eye(4, dtype="f4"))
    assert to_float(backend, loss) == (0.0 if zero_infinity else np.inf)
    for _, gradient in backend.named_gradients(gradients):
        own = backend.to_numpy(gradient)
        assert (own == 0.0).all() if zero_infinity else not np.isfinite(own).any()
    state, result = polyamp.train_step(loss_fn, made)(state, np.eye(4, dtype="f4"))
    assert bool(backend.to_numpy(result.skipped)) is not zero_infinity


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: LOSSES.ctc(x[0], LABELS), r"logits of shape \(batch, frames, classes\).*frames first"),
        (lambda x: LOSSES.ctc(x, LABELS[:2]), r"labels must be integers of shape \(batch, length\)"),
        (lambda x: LOSSES.ctc(x, LABELS * 1.0), "labels must be integers"),
        (lambda x: LOSSES.ctc(x, LABELS, FRAMES[:2]), r"logit_lengths must be integers of shape \(batch,\)"),
        (lambda x: LOSSES.ctc(x, LABELS, FRAMES + 1), r"logit_lengths must be from 1 to 5.*\[6, 4, 6, 5, 6\]"),
        (lambda x: LOSSES.ctc(x, LABELS, FRAMES, COUNTS + 1), r"label_lengths must be from 0 to 3"),
        (lambda x: LOSSES.ctc(x, LABELS), r"labels from 0 to 2 other than blank=0\. Received: -7 at index \(1, 2\)"),
        (lambda x: LOSSES.ctc(x, LABELS, blank=3), r"integer from 0 to 2\. Received: blank=3"),
        (lambda x: LOSSES.ctc(x, LABELS, zero_infinity=1), "zero_infinity must be True or False"),
    ],
)  # fmt: skip
def test_s24_a_ctc_loss_refuses_what_does_not_fit(harness: Harness, call: Any, message: str) -> None:
    with pytest.raises(LossError, match=message):
        call(harness.array(BATCH))

"""Two losses of equal outputs are told apart by their gradients with respect to these."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polyamp.parity.trace.sketch import sketch
from polyamp.parity.verdict.causes.loss_causes import explain_loss

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)
LOGITS = RNG.standard_normal((4, 5, 7))
LABELS = RNG.integers(0, 7, (4, 5))
MASK = np.ones((4, 5), bool)
MASK[1, 3:] = MASK[3, 2:] = False


def cross_entropy(labels: Array, mask: Array, divisor: Any, smoothing: float = 0.0) -> Array:
    """Gradient of a cross-entropy with respect to its logits."""
    shares = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
    targets = np.eye(7)[labels] * (1.0 - smoothing) + smoothing / 7
    return np.asarray((shares - targets) * mask[..., None] / divisor)


RIGHT = cross_entropy(LABELS, MASK, MASK.sum())


def said(one: Array, two: Array) -> str:
    first, second = (sketch(each.astype("f4"), "float32") for each in (one, two))
    found = explain_loss(("a", "b"), (first, second), "loss: 1 in a, 2 in b.")
    return "" if found is None else " ".join([found.kind, found.sentence, *found.evidence])


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (cross_entropy(LABELS, MASK | True, 20), "b counts 20 of 20 places, a 15: padding"),
        (cross_entropy(LABELS, MASK, 20), "a divides by the places that count, b by all places (15 and 20)"),
        (cross_entropy(LABELS, MASK, 1), "a divides by the places that count, b by 1 (a sum) (15 and 1)"),
        (cross_entropy(LABELS, MASK, 4), "a divides by the places that count, b by the rows (15 and 4)"),
        (cross_entropy(LABELS, MASK, 4 * MASK.sum(1)[:, None, None]), "other weights, such as means of rows"),
        (cross_entropy((LABELS + 1) % 7, MASK, 15), "the targets of 15 of 15 places are other classes"),
        (cross_entropy(LABELS, MASK, 15, 0.1), "with other shares (label smoothing"),
        (0.37 * RIGHT, "gradient with respect to the output is 0.37 times a's"),
        (RIGHT, "a term without a gradient"),
    ],
)
def test_losses_of_classes(other: Array, words: str) -> None:
    assert words in said(RIGHT, other)


def test_losses_of_elements() -> None:
    errors = RNG.standard_normal((8, 300))  # of which samples are stored
    assert "b takes the absolute error, a does not. All elements of b's gradient have size 0.125" in said(
        errors, np.sign(errors) / 8
    )
    assert "b does not count some elements that a counts" in said(errors, np.where(errors > 0.5, 0.0, errors))
    assert "element by element: other targets" in said(errors, errors + RNG.standard_normal(errors.shape))
    assert "b's gradient with respect to the output is 2 times a's" in said(errors, 2.0 * errors)

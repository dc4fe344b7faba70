"""S24: which labels, weights and options a loss refuses, and in which words."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from polyamp.errors import LossError
from polyamp.rules import loss_argument_checks


class Traced(NamedTuple):
    """An array of which a compiler knows the type and some lengths."""

    shape: tuple[int | None, ...]
    dtype: str = "float32"


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_s24_the_reductions_are_three(reduction: str) -> None:
    loss_argument_checks.check_reduction(reduction)
    with pytest.raises(LossError, match=rf"'mean', 'sum' or 'none'\. Received: reduction='{reduction}s'"):
        loss_argument_checks.check_reduction(f"{reduction}s")


def test_s24_a_smoothing_is_in_the_closed_unit_interval() -> None:
    for smoothing in (0.0, 0.5, 1.0):
        loss_argument_checks.check_smoothing(smoothing)
    for smoothing in (-1e-9, 1.0 + 1e-9, float("nan")):
        with pytest.raises(LossError, match=r"label_smoothing must be in \[0, 1\]\. Received: label_smoothing="):
            loss_argument_checks.check_smoothing(smoothing)


def test_s24_an_ignored_label_is_an_integer_and_has_no_place_beside_probabilities() -> None:
    for soft in (True, False):
        loss_argument_checks.check_ignore_index(None, soft=soft)
    for index in (-100, 0, np.int64(3)):
        loss_argument_checks.check_ignore_index(index, soft=False)
        with pytest.raises(LossError, match=rf"the labels are probabilities\. Received: ignore_index={index}\. Leave"):
            loss_argument_checks.check_ignore_index(index, soft=True)
    wrong: Any
    for wrong in (1.0, "pad", np.float32(1)):
        with pytest.raises(LossError, match=r"an integer label or None\. Received: ignore_index="):
            loss_argument_checks.check_ignore_index(wrong, soft=False)


@pytest.mark.parametrize(
    ("one", "other", "fit"),
    [
        ((8, 3), (8, 3), True),
        ((), (), True),
        ((8, 3), (8, 1), False),
        ((8,), (8, 1), False),
        ((8, 3), (3,), False),
        ((None, 3), (8, 3), True),
        ((8, None), (8, 3), True),
        ((None, 3), (8, 4), False),
        ((None,), (None, 1), False),
    ],
)
def test_s24_predictions_and_targets_have_one_shape(one: Any, other: Any, fit: bool) -> None:
    """A length that a compiler does not know fits any; nothing is broadcast."""
    for pair in ((one, other), (other, one)):
        predictions, targets = map(Traced, pair)
        if fit:
            loss_argument_checks.check_loss_pair(predictions, targets, what="huber")
            continue
        with pytest.raises(LossError, match=r"^huber needs predictions and targets of one shape\. Received: \("):
            loss_argument_checks.check_loss_pair(predictions, targets, what="huber")


LOGITS = Traced((4, 3))


@pytest.mark.parametrize(
    ("given", "soft"),
    [
        (Traced((4,), "int32"), False),
        (Traced((None,), "uint8"), False),
        (Traced((4, 3), "float32"), True),
        (Traced((4, 3), "bfloat16"), True),
    ],
)
def test_s24_labels_are_indices_or_probabilities_by_dtype_and_shape(given: Traced, soft: bool) -> None:
    assert loss_argument_checks.check_labels(LOGITS, given) is soft


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            Traced((4, 3), "int64"),
            r"int64 of shape \(4, 3\)\. One-hot labels: pass their argmax, or cast ",
        ),
        (Traced((3,), "int64"), r"Received: int64 of shape \(3,\)\.$"),
        (Traced((4,), "float16"), r"float16 of shape \(4,\)\. Labels: cast them to integers\.$"),
        (Traced((4, 1), "float32"), r"Received: float32 of shape \(4, 1\)\.$"),
        (Traced((4,), "bool"), r"Received: Traced\. Make it an array of numbers\."),
        ([0, 1, 2, 0], r"Received: list\. Make it an array of numbers\."),
    ],
)
def test_s24_other_labels_are_refused_with_what_to_do(given: Any, message: str) -> None:
    with pytest.raises(LossError, match=message) as caught:
        loss_argument_checks.check_labels(LOGITS, given)
    assert (
        "integer labels of shape (4,), one per row of the logits, or floating probabilities of the logits' shape (4, "
    )
    assert "3)" in str(caught.value)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8])
def test_s24_labels_on_the_host_are_in_the_classes(dtype: Any) -> None:
    loss_argument_checks.check_label_range(np.array([0, 2, 1], dtype), 3, None)
    loss_argument_checks.check_label_range(np.array([], dtype), 3, None)
    loss_argument_checks.check_label_range(np.array([[3, 3]], dtype), 3, 3)
    loss_argument_checks.check_label_range(np.array([0, 3, 2], dtype), 3, 3)
    with pytest.raises(LossError, match=r"from 0 to 2, for .* 3 classes\. Received: 3 at index \(1,\); of 4 labels 1 "):
        loss_argument_checks.check_label_range(np.array([0, 3, 2, 0], dtype), 3, None)
    with pytest.raises(LossError, match=r"Received: 4 at index \(1, 0\); of 4 labels 2 are .* ignore_index=4\."):
        loss_argument_checks.check_label_range(np.array([[3, 1], [4, 5]], dtype), 3, 3)


def test_s24_a_negative_label_is_outside_unless_it_is_ignored() -> None:
    loss_argument_checks.check_label_range(np.array([-100, 1]), 3, -100)
    with pytest.raises(LossError, match=r"Received: -1 at index \(2,\); of 3 labels 1 are .*ignore_index=-1\."):
        loss_argument_checks.check_label_range(np.array([-100, 1, -1]), 3, -100)


def test_s24_class_weights_are_one_per_class() -> None:
    loss_argument_checks.check_class_weights(Traced((3,)), LOGITS)
    loss_argument_checks.check_class_weights(Traced((3,)), Traced((4, None)))
    for shape in ((4,), (1,), (), (4, 3), (1, 3)):
        with pytest.raises(LossError, match=r"one number per class, shape \(3,\)\. Received shape: \("):
            loss_argument_checks.check_class_weights(Traced(shape), LOGITS)


@pytest.mark.parametrize("shape", [(), (3,), (1,), (4, 3), (4, 1), (1, 1), (None, 3), (None,)])
def test_s24_weights_broadcast_to_the_predictions(shape: Any) -> None:
    loss_argument_checks.check_weights(Traced(shape), LOGITS)


@pytest.mark.parametrize("shape", [(4,), (2,), (3, 4), (0,), (1, 4, 3), (1, 1, 1), (None, 4, 3), (4, 2), (5, 3)])
def test_s24_other_weights_are_refused(shape: Any) -> None:
    with pytest.raises(LossError, match=r"shape of the predictions, \(4, 3\)\. Received shape: \(.*axes of 1 behind\."):
        loss_argument_checks.check_weights(Traced(shape), LOGITS)

"""Where values came from before the first step, where a gradient is cut off, and what the indices that differ say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polyamp.parity.trace.sketch import sketch
from polyamp.parity.trace.trace import Entry, Stage, entry_key
from polyamp.parity.verdict.causes.element_profile import attention_evidence, differing_indices, index_evidence
from polyamp.parity.verdict.causes.gradient_causes import backward_evidence, missing_gradient
from polyamp.parity.verdict.causes.initial_weights import explain_initial_weight
from polyamp.parity.verdict.causes.normalizations import has_batch_statistics
from polyamp.parity.verdict.step_entries import is_absent

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)
KERNEL, OTHER = RNG.standard_normal((6, 6)), RNG.standard_normal((6, 6))


def entry(module: str, what: str, array: Array, stage: Stage = "backward", dtype: str = "float32") -> Entry:
    name = "" if what in ("output", "cotangent") else "kernel"
    step = 0 if stage == "update" else 1
    made = sketch(array.astype("f4"), dtype)
    return Entry(step=step, stage=stage, module=module, what=what, name=name, sketch=made)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (KERNEL.T, "with axes 0 and 1 exchanged (transposed)"),
        (KERNEL[::-1], "turned round along axis 0"),
        (np.roll(KERNEL, 3, 1), "shifted by 3 of 6 along axis 1"),
        (np.sort(KERNEL), "in another order"),
        (OTHER, "began with the values of 'kernel' of 'key' as parameter 'kernel' of 'query': exchanged"),
        (KERNEL.astype("f2").astype("f4"), "in fewer digits"),
        (2 * KERNEL, "began with other values"),
    ],
)
def test_where_an_initial_weight_came_from(array: Array, words: str) -> None:
    first = [entry("query", "parameter", KERNEL, "update"), entry("key", "parameter", OTHER, "update")]
    found = explain_initial_weight(("a", "b"), (first[0], entry("query", "parameter", array, "update")), first)
    assert words in found.sentence


def step(*entries: Entry) -> dict[Any, Entry]:
    return {entry_key(each): each for each in entries}


FORWARD = [entry(path, "output", KERNEL, "forward") for path in ("embed", "encoder", "head")]


def test_a_gradient_that_is_cut_off_names_what_lacks_one() -> None:
    ours = step(*FORWARD, *(entry(path, "gradient", KERNEL) for path in ("head", "encoder", "embed")))
    theirs = {key: entry(each.module, "gradient", 0 * KERNEL, dtype="") for key, each in ours.items()}
    theirs |= step(*FORWARD, entry("head", "gradient", KERNEL))
    key = entry_key(entry("encoder", "gradient", KERNEL))
    assert is_absent(theirs[key])
    found = missing_gradient(("a", "b"), (ours[key], theirs[key]), (ours, theirs))
    assert found.evidence[0] == (
        "b has no gradient of 2 arrays, those of encoder, embed. The last of them in the forward pass is 'encoder': "
        "cut off (detached) behind it."
    )
    alone = {**theirs, entry_key(entry("embed", "gradient", KERNEL)): entry("embed", "gradient", KERNEL)}
    assert "frozen" in missing_gradient(("a", "b"), (ours[key], theirs[key]), (ours, alone)).evidence[0]


def test_the_backward_pass_is_said_to_agree_up_to_a_module() -> None:
    head, encoder = (entry(path, "cotangent", KERNEL) for path in ("head", "encoder"))
    wrong = entry("encoder", "cotangent", OTHER)
    assert backward_evidence(encoder, (step(head, encoder), step(head, wrong))) == [
        "The gradient that reaches the output of 'head' agrees: between the two."
    ]
    gradient = entry("encoder", "gradient", KERNEL)
    sides = step(head, encoder, gradient), step(head, encoder, entry("encoder", "gradient", OTHER))
    assert "used elsewhere too (tied)" in backward_evidence(gradient, sides)[0]


ATTENDED = RNG.standard_normal((4, 6, 16))


def said(rows: Any, positions: Any, channels: Any) -> tuple[list[str], list[str]]:
    other = ATTENDED.copy()
    other[rows, positions, channels] += 1.0
    profile = differing_indices(sketch(ATTENDED, "float32"), sketch(other, "float32"), 1e-6)
    return index_evidence(profile), attention_evidence(profile)


def test_the_indices_that_differ_say_what_part_of_an_attention() -> None:
    every = slice(None)
    indices, words = said(every, slice(1, None), every)
    assert indices == ["They differ only at index 1 to 5 of axis 1 (length 6)."]
    assert words[0].startswith("Position 0, which attends to itself alone, agrees")
    assert said(every, slice(0, 5), every)[1] == [
        "The last position, which sees all others, agrees: the causal mask differs."
    ]
    indices, words = said([0, 1, 3], every, every)
    assert indices == ["They differ only at index 0 to 1, 3 of axis 0 (length 4)."]
    assert words[0].startswith("Some rows of the batch agree")
    assert said(every, every, slice(4, 8))[1][0].startswith("Some channels agree: some heads")
    assert said(every, every, every) == ([], [])


def test_statistics_of_the_batch_leave_the_bias_as_the_mean() -> None:
    x, bias = RNG.standard_normal((8, 5)), RNG.standard_normal(5)
    assert has_batch_statistics(((x - x.mean(0)) / x.std(0) + bias).ravel(), x.shape, bias)
    assert not has_batch_statistics((x + bias).ravel(), x.shape, bias)

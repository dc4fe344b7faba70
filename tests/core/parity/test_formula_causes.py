"""What each side computes between arrays that agree and the first that does not, from the values alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polyamp.contract.casting_report import OperationCount
from polyamp.parity.trace.sketch import sample_indices, sketch
from polyamp.parity.trace.trace import Entry, Trace
from polyamp.parity.verdict.alignment import Alignment
from polyamp.parity.verdict.causes.common_factors import explain_zeros
from polyamp.parity.verdict.causes.formula_causes import explain_columns, explain_formula
from polyamp.parity.verdict.causes.known_arrays import KnownArray
from polyamp.parity.verdict.causes.operation_causes import (
    call_differences,
    narrow_operations,
    near_operations,
    operation_differences,
)
from polyamp.porting.layouts.activations import apply_activation

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)
UP, GATE, SKIP = (RNG.standard_normal((8, 16)) for _ in range(3))
KNOWN = [KnownArray(name, "output", x.ravel(), x.shape) for name, x in (("up", UP), ("gate", GATE), ("skip", SKIP))]
SCALE, BIAS = RNG.standard_normal(16), RNG.standard_normal(16)


def act(name: str, x: Array) -> Array:
    found = apply_activation(name, x)
    assert found is not None
    return found


def norm(x: Array, epsilon: float, *, centered: bool = False) -> Array:
    rows = x - x.mean(1, keepdims=True) if centered else x
    return np.asarray(rows / np.sqrt(np.square(rows).mean(1, keepdims=True) + epsilon))


def said(one: Array, two: Array) -> str:
    sides = one.astype("f4").astype("f8").ravel(), two.astype("f4").astype("f8").ravel()
    found = explain_formula(("a", "b"), sides, KNOWN, "here", {("norm", "scale"): SCALE, ("norm", "bias"): BIAS})
    return "" if found is None else f"{found.kind}: {found.sentence}"


@pytest.mark.parametrize(
    ("one", "two", "words"),
    [
        (act("gelu", UP), act("gelu_tanh", UP), "a computes gelu of up, b computes gelu_tanh of up"),
        (act("relu", UP), np.where(UP > 0, UP, np.expm1(UP)), "a computes relu of up, b computes elu of up"),
        (act("relu", UP), UP, "a computes relu of up, b computes up"),
        (act("relu", UP), np.where(UP > 0, UP, 0.2 * UP), "b computes leaky_relu (0.2) of up"),
        (act("silu", GATE) * UP, act("gelu", GATE) * UP, "a computes silu(gate) * up, b computes gelu(gate) * up"),
        (act("silu", GATE) * UP, act("silu", UP) * GATE, "b computes silu(up) * gate"),
        (UP + SKIP, UP, "a computes up + skip, b computes up"),
        (UP + SKIP, UP + GATE, "a computes up + skip, b computes up + gate"),
        (UP / 4, UP / 8, "a computes 0.25 * up, b computes 0.125 * up"),
        (act("relu", UP), UP.clip(0.0, 0.5), "b computes up clipped to 0 and 0.5"),
        (SKIP + SCALE * UP, SKIP + UP, "a computes skip + norm.scale * up, b computes up + skip"),
        (SKIP + SCALE * UP, SCALE * (UP + SKIP), "b computes norm.scale * (up + skip)"),
        (UP + SKIP, 0 * UP, "a computes up + skip, b computes 0 everywhere"),
        (UP + SKIP, RNG.standard_normal((8, 16)), "a computes up + skip, b does not"),
    ],
)
def test_a_formula_of_known_arrays_is_named(one: Array, two: Array, words: str) -> None:
    found = said(one, two)
    assert found.startswith("formula: ")
    assert words in found


@pytest.mark.parametrize("centered", [False, True])
def test_an_epsilon_is_measured(centered: bool) -> None:
    one, two = (norm(SKIP, epsilon, centered=centered) * SCALE + BIAS * centered for epsilon in (1e-5, 1e-3))
    what = "the layer normalization of skip * norm.scale + bias" if centered else "the RMS normalization of skip * norm"
    found = said(one, two)
    assert found.startswith(f"epsilon: Another epsilon of {what}")
    assert "here: about 1e-05 in a, 0.001 in b." in found


@pytest.mark.parametrize("centered", [False, True])
def test_the_epsilons_of_a_large_array_differ_by_what_its_samples_show(centered: bool) -> None:
    x = np.random.default_rng(1).standard_normal((4, 4, 256))
    places = sample_indices(x.size)
    known = [KnownArray("embed", "output", x.ravel()[places], x.shape)]
    one, two = (norm(x.reshape(16, 256), each, centered=centered).ravel()[places] for each in (1e-6, 1e-3))
    found = explain_formula(("a", "b"), (one, two), known, "here", {})
    assert found is not None
    assert "normalization of embed, here: b's is larger by 0.00" in found.sentence


def test_the_factor_of_a_gemma_norm_is_one_plus_its_weight() -> None:
    found = said(norm(UP, 1e-6) * SCALE, norm(UP, 1e-6) * (1 + SCALE))
    assert "a computes the RMS normalization of up * norm.scale, b computes the RMS normalization of up * (1 +" in found


def test_a_dropout_is_told_from_its_zeros_and_its_factor() -> None:
    mask = RNG.random((8, 16)) >= 0.25
    assert "b computes dropout(up; " in said(UP, UP * mask / 0.75)
    assert "of its elements set to 0" in said(UP, UP * mask)
    assert " are 0, the others times 1.333)" in said(SKIP + UP, SKIP + UP * mask / 0.75)


def test_nothing_is_said_of_unknown_formulas() -> None:
    assert said(np.sin(3 * UP), np.cos(GATE)) == ""
    assert said(act("gelu", UP), act("gelu", UP)) == ""


def test_the_columns_of_a_joined_array_have_formulas_too() -> None:
    one, two = (np.concatenate([act(name, UP), GATE], 1) for name in ("relu", "silu"))
    found = explain_columns(("a", "b"), (one, two), KNOWN[:1], "here")
    assert found is not None
    assert found.sentence == "a has relu of up, b has silu of up in columns 0 to 15 of 32: other formulas here."
    assert explain_columns(("a", "b"), (one, one), KNOWN[:1], "here") is None


def trace(*operations: tuple[str, str, str]) -> Trace:
    return Trace(side="a", phase="float32", operations=[OperationCount(*each, "", 1) for each in operations])


ALIGNED = Alignment(modules={"": "", "block": "block"})
WHOLE = trace(("block", "softmax", "float32"), ("block/inner", "add", "float32"), ("", "mul", "float32"))


def test_16_bits_in_one_side_of_a_float32_run_are_named() -> None:
    narrow = trace(("block", "softmax", "bfloat16"), ("block", "add", "float32"), ("", "mul", "float32"))
    near = [near_operations(each, ALIGNED, ["block"]) for each in (WHOLE, narrow)]
    found = narrow_operations(("a", "b"), near, "here")
    assert found is not None
    assert found.kind == "dtype"
    assert found.sentence == "b computes in bfloat16 inside a float32 model here."
    assert found.evidence == ["In b alone: softmax in bfloat16 (block)."]
    assert narrow_operations(("a", "b"), [near[1], near[1]], "here") is None


def test_operations_of_one_side_alone_are_listed_in_one_framework() -> None:
    other = trace(("block", "softmax", "float32"), ("", "mul", "float32"), ("block", "mul", "float32"))
    near = [near_operations(each, ALIGNED, ["block"]) for each in (WHOLE, other)]
    assert operation_differences(("a", "b"), (WHOLE, other), near) == ["Operations: in a alone add; in b alone mul."]
    foreign = trace(("block", "dot_general", "float32"), ("block", "exp", "float32"))
    assert operation_differences(("a", "b"), (WHOLE, foreign), [near[0], foreign.operations]) == []
    assert len(near[0]) == 2  # an inner module without a partner belongs to its container


def test_layers_that_one_side_calls_instead_of_others_are_named() -> None:
    def step(*modules: str) -> dict[Any, Entry]:
        made = sketch(UP.astype("f4"), "float32")
        return {m: Entry(step=1, stage="forward", module=m, what="output", sketch=made) for m in modules}

    aligned = Alignment(modules={"": ""}, layer_kinds={"layers/0": "dense", "layers/1": "dense"})
    sides = step("layers/0", "layers/1"), step("layers/0", "layers/0#2")
    assert call_differences(("a", "b"), sides, aligned) == [
        "Calls: a calls 'layers/1' more often; b calls 'layers/0' more often."
    ]
    assert call_differences(("a", "b"), (sides[0], step("layers/0")), aligned) == []  # it may not show the other's


@pytest.mark.parametrize(
    ("ours", "theirs", "kind", "sentence"),
    [
        ([1, 2, 3, 4, 5, 6], [1, 2, 0, 4, 5, 6], "formula", "b sets elements to 0 here, and the rest agrees: a mask."),
        ([1, 0, 0, 4, 5, 6], [1, 0, 3, 4, 5, 6], "formula", "a sets elements to 0 here, and the rest agrees: a mask."),
        ([1, 2, 3, 4, 5, 6], [2, 4, 0, 8, 10, 12], "randomness", None),  # what is kept is multiplied
        ([0, 0, 3, 4, 5, 6, 7], [1, 2, 0, 4, 5, 6, 7], "randomness", None),  # either keeps others
    ],
)
def test_zeros_on_one_side_are_a_mask_where_the_rest_is_equal_and_a_dropout_otherwise(
    ours: list[float], theirs: list[float], kind: str, sentence: str | None
) -> None:
    a, b = (sketch(np.asarray(each, np.float32), "float32") for each in (ours, theirs))

    found = explain_zeros(("a", "b"), a, b, "here")

    assert found is not None
    assert found.kind == kind
    assert found.sentence == (sentence or "Other elements are 0 here, and the rest agrees up to a factor: a dropout.")


def test_zeros_among_elements_that_differ_are_neither() -> None:
    a, b = (sketch(np.asarray(each, np.float32), "float32") for each in ([1, 2, 3, 4, 5], [1, 2, 0, 4, 6]))
    assert explain_zeros(("a", "b"), a, b, "here") is None

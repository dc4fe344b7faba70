"""Notes and lines of a report that must be true: each was untrue or missing once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.contract.casting_report import OperationCount
from polyamp.errors import PortError
from polyamp.parity.precisions import FLOAT32, POLICY, Phase
from polyamp.parity.report_data import Comparison
from polyamp.parity.trace.sketch import sketch
from polyamp.parity.trace.trace import Entry, Stage, Trace
from polyamp.parity.verdict.alignment import Alignment
from polyamp.parity.verdict.step_entries import PhaseTrace
from polyamp.parity.verdict.verdict import compare_traces
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.reference import MLP

RNG = np.random.default_rng(0)
BRAIN = Recipe(policy=Policy.of("mixed_bfloat16"))


def entry(module: str, what: str, array: Any, stage: Stage = "forward", step: int = 1, name: str = "") -> Entry:
    made = sketch(np.asarray(array, np.float32), "float32")
    return Entry(step=step, stage=stage, module=module, what=what, name=name, sketch=made, own=module)


def judged(
    ours: list[Entry],
    theirs: list[Entry],
    phase: str = FLOAT32,
    recipe: Recipe | None = None,
    alignment: dict[str, Any] | None = None,
    traces: dict[str, Any] | None = None,
) -> Comparison:
    agreed = {"modules": {"": "", "a": "a", "b": "b"}, "layer_kinds": {"a": "dense", "b": "dense"}}
    runs = [
        PhaseTrace(Trace(side="", phase=phase, **{key: each[number] for key, each in (traces or {}).items()}), kept)
        for number, kept in enumerate((lambda: ours, lambda: theirs))
    ]
    both = [(Phase(name=phase, title=phase), runs[0], runs[1])]
    return compare_traces(("one", "two"), both, Alignment(**{**agreed, **(alignment or {})}), (recipe, recipe))


def test_an_output_that_was_compared_at_another_call_is_not_said_to_be_left_out() -> None:
    wide, tall = np.ones((8, 4)), np.ones((4, 8))
    both = judged([entry("a", "output", wide), entry("a#2", "output", tall)],
                  [entry("a", "output", tall), entry("a#2", "output", tall)])  # fmt: skip
    never = judged([entry("a", "output", wide)], [entry("a", "output", tall)])

    assert both.notes == []
    assert never.notes == ["a gives [8, 4] in one and [4, 8] in two: its output is not compared"]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((2, 0), ["dropout was off: 2 calls in one and 0 calls in two. With dropout they do not train alike"]),
        ((2, 1), ["dropout was off: 2 calls in one and 1 call in two. With dropout they do not train alike"]),
        ((2, 2), []),
        ((2, None), []),
    ],
)
def test_dropout_is_counted_on_both_sides(counts: tuple[int | None, int | None], expected: list[str]) -> None:
    assert judged([], [], traces={"dropouts": counts}).notes == expected


@pytest.mark.parametrize(("rate", "notes"), [(0.0, 1), (0.1, 0)])
def test_trainings_that_both_stand_still_are_said_to(rate: float, notes: int) -> None:
    recipe = polyamp.Recipe(optimizer=polyamp.sgd(rate))
    data = {"x": RNG.standard_normal((16, 4)).astype("f4"), "y": RNG.standard_normal((16, 1)).astype("f4")}
    report = polyamp.compare(
        MLP.random([4, 8, 1], seed=0),
        MLP.random([4, 8, 1], seed=1),
        data,
        lambda model, batch: polyamp.losses.mean_squared_error(model(batch["x"]), batch["y"]),
        recipe,
        steps=2,
    )
    found = [note for note in report.comparisons[0].notes if note.startswith("nothing moved: no parameter changed")]
    assert len(found) == notes


def test_a_port_error_in_a_comparison_offers_nothing_that_compare_does_not_take() -> None:
    with pytest.raises(PortError) as caught:
        polyamp.compare(MLP.random([4, 8, 1], seed=0), MLP.random([4, 9, 1], seed=0), np.ones((2, 4), np.float32))
    assert "strict" not in str(caught.value)
    assert str(caught.value).endswith("A comparison needs a partner for each of them: names={source: target} says "
                                      "which it is.")  # fmt: skip


ACTIVATION = "b: activation is 'relu', in the source (a) None. Write: model.b.activation = None"


@pytest.mark.parametrize(("agrees", "shown"), [(True, "The outputs agree: it runs elsewhere"), (False, "Write: model")])
def test_no_advice_to_change_an_activation_of_outputs_that_agree(agrees: bool, shown: str) -> None:
    other = np.ones((4, 8)) if agrees else np.ones((4, 8)) + RNG.standard_normal((4, 8))
    found = judged(
        [entry("a", "output", np.ones((4, 8))), entry("b", "input", np.ones((4, 8)))],
        [entry("a", "output", np.ones((4, 8))), entry("b", "input", other)],
        alignment={
            "differences": {"a": [ACTIVATION]},
            "differing_attributes": {"a": ["activation"]},
            "notes": [f"the weights do not carry: {ACTIVATION}"],
        },
    )
    assert (found.first is None) is agrees
    assert shown in found.notes[0]
    assert ("Write:" in found.notes[0]) is not agrees


def test_a_difference_that_no_float32_run_judges_is_not_said_to_be_alike_in_float32() -> None:
    one = RNG.standard_normal((20, 20))
    first = judged(
        [entry("a", "exp_avg", one, "update", name="kernel")],
        [entry("a", "exp_avg", one + 0.5 * RNG.standard_normal((20, 20)), "update", name="kernel")],
        POLICY,
        BRAIN,
    ).first
    assert first is not None
    assert "like in float32" not in first.sentence
    assert "without a run in float32" in first.sentence


def test_what_comes_out_of_a_hidden_recurrent_cell_is_no_input_of_it() -> None:
    given = RNG.standard_normal((4, 8))
    first = judged(
        [entry("embed", "output", given), entry("head", "input", given)],
        [entry("embed", "output", given), entry("head", "input", given + 0.1)],
        alignment={
            "modules": {"": "", "embed": "embed", "gru": "gru", "head": "head"},
            "layer_kinds": {"embed": "embedding", "gru": "gru", "head": "dense"},
        },
    ).first
    assert first is not None
    assert (first.module, first.what) == ("gru", "output")


@pytest.mark.parametrize(("policy", "rule", "differs"), [
    ("mixed_bfloat16", "sums", True),
    ("mixed_bfloat16", "follow", False),  # a Keras layer's own `call`
    (Policy(param="float32", compute="bfloat16", output="float32", mode="cast"), "sums", False),
])  # fmt: skip
def test_a_sum_in_16_bits_is_a_difference_where_the_policy_keeps_it_in_float32(
    policy: Any, rule: str, differs: bool
) -> None:
    rows = [OperationCount("a", "Mean", "bfloat16", rule, 1)], [OperationCount("a", "mean", "float32", "sums", 1)]
    output = [entry("a", "output", np.ones((4, 8)))]
    recipe = Recipe(policy=Policy.of(policy) if isinstance(policy, str) else policy)
    found = judged(output, output, POLICY, recipe, traces={"operations": rows})
    assert (found.first is not None) is differs

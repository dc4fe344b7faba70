"""Updates whose gradients are rounded to 16 bits: a right one agrees, and another rate, decay or momentum does not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polyamp.parity.precisions import POLICY, Phase
from polyamp.parity.report_data import Comparison, JudgedUpdates
from polyamp.parity.trace.sketch import sketch
from polyamp.parity.trace.trace import Entry, Stage, Trace
from polyamp.parity.verdict.alignment import Alignment
from polyamp.parity.verdict.step_entries import PhaseTrace
from polyamp.parity.verdict.verdict import compare_traces
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe

Array = Any
Rule = Callable[[Array, Array], Array]
"""Parameter and gradient -> parameter after the step."""
RECIPE = Recipe(policy=Policy.of("mixed_bfloat16"))
SIZE = (12, 20)


def adamw(rate: float, decay: float) -> Rule:
    """The first step of AdamW."""
    return lambda weight, gradient: weight - rate * (np.sign(gradient) + decay * weight)


def sgd(rate: float, decay: float) -> Rule:
    return lambda weight, gradient: weight - rate * (gradient + decay * weight)


def side(rule: Rule, noise: int, gradients: float = 1.0) -> PhaseTrace:
    """One step of a parameter whose gradient is rounded: 2 % off, as bfloat16's is after a few layers."""
    rng = np.random.default_rng(0)
    weight, gradient = (0.3 * rng.standard_normal(SIZE)).astype("f4"), rng.standard_normal(SIZE).astype("f4")
    gradient = gradient + 0.02 * np.random.default_rng(noise).standard_normal(SIZE).astype("f4")

    def entry(step: int, stage: Stage, what: str, array: Array) -> Entry:
        made = sketch(array.astype("f4"), "float32")
        return Entry(step=step, stage=stage, module="fc", what=what, name="kernel", sketch=made)

    found = [
        entry(0, "update", "parameter", weight),
        entry(1, "backward", "gradient", gradient * gradients),
        entry(1, "update", "parameter", rule(weight, gradient)),
    ]
    return PhaseTrace(Trace(side="", phase=POLICY), lambda: found)


def judged(one: PhaseTrace, two: PhaseTrace) -> Comparison:
    agreed = Alignment(modules={"fc": "fc", "": ""}, layer_kinds={"fc": "dense"})
    runs = [(Phase(name=POLICY, title="mixed_bfloat16"), one, two)]
    return compare_traces(("one", "two"), runs, agreed, (RECIPE, RECIPE))


@pytest.mark.parametrize("seed", range(1, 30))
@pytest.mark.parametrize("rule", [adamw(1e-2, 0.1), sgd(1e-2, 0.1)], ids=["adamw", "sgd"])
def test_right_updates_of_rounded_gradients_agree(rule: Rule, seed: int) -> None:
    found = judged(side(rule, 2 * seed), side(rule, 2 * seed + 1))
    assert found.first is None
    assert found.updates == [JudgedUpdates(phase="mixed_bfloat16", judged=1, updated=1)]


@pytest.mark.parametrize(
    ("right", "wrong", "why"),
    [
        (adamw(1e-2, 0.01), adamw(1e-2, 0.5), r"They differ by -4\.9\de-03 times the parameter as it was"),
        (adamw(1e-2, 0.1), adamw(1e-2, 0.0), r"They differ by 1\.00e-03 times the parameter as it was"),
        (adamw(1e-2, 0.1), adamw(2e-2, 0.1), r"two's update is 2 times one's: another learning rate"),
        (sgd(1e-2, 0.1), sgd(1.2e-2, 0.1), r"Another learning rate\. two's update is 1\.2 times one's"),
        (adamw(1e-2, 0.1), lambda weight, _: weight, r"two's update is 0 times one's"),
    ],
    ids=["decay", "no decay", "rate", "rate of sgd", "stands still"],
)
def test_another_rule_is_found_in_rounded_gradients(right: Rule, wrong: Rule, why: str) -> None:
    first = judged(side(right, 1), side(wrong, 2)).first
    assert first is not None
    assert (first.step, first.stage, first.what, first.kind) == (1, "update", "parameter", "formula")
    assert re.search(why, " ".join([first.sentence, *first.evidence]))


def test_an_update_whose_gradients_have_nothing_in_common_is_not_judged() -> None:
    rng = np.random.default_rng(3)
    other = side(adamw(1e-2, 0.1), 1)
    entries = list(other.entries())
    noise = sketch(rng.standard_normal(SIZE).astype("f4"), "float32")
    entries[1] = Entry(step=1, stage="backward", module="fc", what="gradient", name="kernel", sketch=noise)
    updates = judged(side(adamw(1e-2, 0.1), 2), other._replace(entries=lambda: entries)).updates
    assert [(each.judged, each.updated) for each in updates] == [(0, 1)]

"""What is allowed, and what an optimizer does otherwise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from polyamp.contract.casting_report import OperationCount
from polyamp.parity.precisions import FLOAT32, FLOAT64, Phase
from polyamp.parity.trace.sketch import sketch
from polyamp.parity.trace.trace import Entry, Stage, Trace
from polyamp.parity.verdict.alignment import Alignment
from polyamp.parity.verdict.distances import EntryComparison, EntryPair, prefer_float64_distance
from polyamp.parity.verdict.optimizer_updates import OptimizerUpdates
from polyamp.parity.verdict.step_entries import PhaseTrace
from polyamp.parity.verdict.tolerances import (
    DRIFT_FACTOR,
    FACTOR,
    NO_WIDE_RUN_FACTOR,
    SWITCH_FACTOR,
    JudgePrecision,
    PhaseTolerance,
)
from polyamp.parity.verdict.verdict import compare_traces

SINGLE, BRAIN = 2.0**-24, 2.0**-8


def _entry(step: int, stage: Stage, module: str, what: str, values: Any, name: str = "") -> Entry:
    array = np.asarray(values, np.float32)
    return Entry(step=step, stage=stage, module=module, what=what, name=name, sketch=sketch(array, "float32"))


def test_float32_allows_the_sum_of_own_distances_and_a_policy_the_smaller() -> None:
    assert PhaseTolerance(SINGLE, True, True).allowed((1e-5, 3e-5), 1, 1.0) == FACTOR * 4e-5
    assert PhaseTolerance(SINGLE, True, True).allowed((1e-5, None), 1, 1.0) == FACTOR * 2e-5
    assert PhaseTolerance(BRAIN, False, True).allowed((0.1, 0.3), 1, 1.0) == FACTOR * 0.1
    assert PhaseTolerance(BRAIN, False, True).allowed((0.1, 0.3), 1, 1.0, same_inputs=False) == FACTOR * 0.3


def test_a_judge_is_as_exact_as_the_narrowest_operation_before() -> None:
    def rows(*found: tuple[str, str]) -> Trace:
        operations = [OperationCount(module, "multiply", dtype, "", 1) for module, dtype in found]
        return Trace(side="one", phase=FLOAT64, operations=operations)

    alignment = Alignment(modules={name: name for name in ("a", "b", "c", "d")})
    wide = rows(("a", "float64"), ("b", "float64, float32"), ("b", "float64"), ("c", "float64"), ("c", "int32"))
    judge = JudgePrecision(alignment, [wide, rows(("a", "float64"), ("b", "float64"), ("c", "float64"))], SINGLE)
    assert [judge.limit(module) for module in ("a", "b", "c", "d", "")] == [0.0, SINGLE, SINGLE, SINGLE, SINGLE]
    assert judge.common("c") == judge.common("a", forward=False) == 0.0  # float32 is what is judged

    assert [judge.is_exact_since(*pair) for pair in (("", "a"), ("a", "b"), ("b", "c"), ("c", "d"))] == [1, 0, 1, 0]

    halves = rows(("a", "float64"), ("b", "bfloat16"), ("c", "float16"))
    both = JudgePrecision(alignment, [halves, halves], SINGLE)
    assert [both.common(module) for module in ("a", "b", "c")] == [0.0, BRAIN, BRAIN]
    assert both.common("a", forward=False) == both.limit("c") == BRAIN
    alone = JudgePrecision(alignment, [halves, wide], SINGLE)
    assert (alone.common("c"), alone.limit("c")) == (0.0, SINGLE)
    assert JudgePrecision(alignment, [], SINGLE).limit("a") == 0.0


def test_without_a_judge_arithmetic_counts_sums() -> None:
    assert PhaseTolerance(SINGLE, True, True).allowed((None, None), 4, 1.0) == FACTOR * NO_WIDE_RUN_FACTOR * SINGLE * 2


def test_switched_units_allow_what_they_are_of_the_gradient() -> None:
    judge, root = PhaseTolerance(2.0**-11, False, True), math.sqrt(2.0**-11)

    assert judge.allowed((1e-4, 0.9), 1, 1.0, switched=0.05) == pytest.approx(SWITCH_FACTOR * 0.05)
    assert judge.allowed((1e-4, 0.9), 1, 1.0, switched=0.0) == pytest.approx(FACTOR * 2.0**-11)
    assert judge.allowed((1e-4, None), 1, 1.0, switched=0.0) == pytest.approx(2 * root)
    assert judge.allowed((1e-4, 0.9), 1, 1.0) == pytest.approx(FACTOR * 2.0**-11)


def test_parameters_that_are_apart_allow_what_they_make() -> None:
    assert PhaseTolerance(SINGLE, True, True).allowed((1e-9, 1e-9), 1, 2.0, drift=1e-3) == DRIFT_FACTOR * 2e-3


@pytest.mark.parametrize(
    ("moved", "why"),
    [
        (lambda p, g: p - 0.2 * g, "The second side's update is 2 times the first's: another learning rate or bias"),
        (lambda p, g: p - 0.1 * g - 1e-3 * p, "They differ by -1.00e-03 times the parameter as it was: another weight"),
    ],
)
def test_rate_and_decay_are_told_apart(moved: Any, why: str) -> None:
    rng = np.random.default_rng(0)
    before, gradient = rng.standard_normal((2, 200)).astype("f4")
    updates = OptimizerUpdates(PhaseTolerance(SINGLE, True, True))
    start = _entry(0, "update", "fc", "parameter", before, "kernel")
    assert updates.compare_parameter(EntryPair(start, start)) is not None
    ours = _entry(1, "update", "fc", "parameter", before - 0.1 * gradient, "kernel")
    theirs = _entry(1, "update", "fc", "parameter", moved(before, gradient), "kernel")

    found = updates.compare_parameter(EntryPair(ours, theirs))

    assert found is not None
    assert found.counts
    assert found.why.startswith(why)


def test_float64_runs_tell_what_float32_hides() -> None:
    one, wide = _entry(1, "forward", "fc", "output", [1.0, 2.0]), _entry(1, "forward", "fc", "output", [1.0, 2.0])
    other = _entry(1, "forward", "fc", "output", [1.0, 2.0 + 1e-6])
    found = EntryComparison(one, one, 0.0, 1.0, 2.0, (None, None))

    assert prefer_float64_distance(found, (wide, other), 1e-7).distance == pytest.approx(1e-6, rel=0.1)
    assert prefer_float64_distance(found, (wide, other), 1e-5) is found
    assert prefer_float64_distance(found, (wide, None), 1e-7) is found


def _judged(ours: list[Entry], theirs: list[Entry]) -> Any:
    agreed = Alignment(modules={"fc": "fc", "": ""}, layer_kinds={"fc": "dense"})
    trace = Trace(side="", phase=FLOAT32)
    runs = [(Phase(name=FLOAT32, title=FLOAT32), PhaseTrace(trace, lambda: ours), PhaseTrace(trace, lambda: theirs))]
    return compare_traces(("one", "two"), runs, agreed, (None, None))


def test_outputs_that_the_losses_take_in_two_ways_are_a_note() -> None:
    def side(outputs: list[float], gradient: list[float]) -> list[Entry]:
        return [
            _entry(1, "forward", "fc", "output", [1.0, 2.0]),
            _entry(1, "forward", "", "output", outputs),
            _entry(1, "backward", "fc", "gradient", gradient, "kernel"),
        ]

    same_policy = _judged(side([1.0, 2.0], [1.0, 1.0]), side([-1.3, -0.3], [1.0, 1.0]))
    apart = _judged(side([1.0, 2.0], [1.0, 1.0]), side([-1.3, -0.3], [1.0, 1.5]))

    assert same_policy.first is None
    assert "the models' outputs differ, and neither the losses nor any gradient" in same_policy.notes[-1]
    assert (apart.first.stage, apart.first.module, apart.first.what) == ("forward", "", "output")

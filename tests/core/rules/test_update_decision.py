"""S9 to S14: the decision for states whose parameter is one number."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from polyamp import LossScaler, LossScaleStuckError
from polyamp.reference.arrays import XP
from polyamp.rules import stuck_scale
from polyamp.rules.update_decision import GradStats, Skip, UpdateDecision, decide


def decisions(scaler: LossScaler, values: list[float], skip: Skip = "all", weight: Any = None) -> list[UpdateDecision]:
    """The decisions of states that step together, for gradients of these values."""
    measured = [GradStats(np.float32(abs(value)), np.asarray(np.isfinite(value)), weight) for value in values]
    flags = [stats.finite for stats in measured]
    step, before = np.asarray(0, np.int32), scaler.init("reference")
    return [decide(scaler, before, step, stats, flags, skip, XP) for stats in measured]


@pytest.mark.parametrize(("skip", "applied"), [("all", [False, False]), ("each", [True, False])])
def test_s14_one_overflow_and_one_adjustment(skip: Skip, applied: list[bool]) -> None:
    made = decisions(LossScaler(init_scale=8.0), [0.5, np.inf], skip)
    assert [bool(each.finite) for each in made] == applied == [not bool(each.skipped) for each in made]
    assert [int(each.step) for each in made] == [int(flag) for flag in applied]
    assert [float(each.scale_state.scale) for each in made] == [4.0, 4.0]
    assert [int(each.scale_state.skipped) for each in made] == [1, 1]


def test_s19_where_nothing_is_checked_the_update_is_always_applied() -> None:
    (made,) = decisions(LossScaler.off(), [np.nan])
    assert made.finite is None
    assert not bool(made.skipped)
    assert int(made.step) == 1
    assert float(made.scale_state.scale) == 1.0


@pytest.mark.parametrize("scaler", [LossScaler.off(), LossScaler(init_scale=8.0, growth_interval=1)])
@pytest.mark.parametrize(("weight", "applied"), [(0.0, False), (2.0, True)])
def test_s08_a_step_of_weight_0_is_skipped_and_leaves_the_scale(
    scaler: LossScaler, weight: float, applied: bool
) -> None:
    (made,) = decisions(scaler, [0.5], weight=np.float32(weight))
    assert bool(made.finite) is applied is not bool(made.skipped)
    assert int(made.step) == int(applied)
    assert int(made.scale_state.skipped) == int(not applied)
    assert float(made.scale_state.scale) == float(scaler.init("reference").scale) * (1 + (applied and scaler.scales))


def test_s09_a_decision_reports_the_numbers_of_its_step() -> None:
    stats = GradStats(np.float32(3.0), np.asarray(True), np.float32(5.0))
    scaler, step = LossScaler(init_scale=8.0), np.asarray(4, np.int32)
    result = decide(scaler, scaler.init("reference"), step, stats, [stats.finite], "all", XP).result(stats)
    assert (result.loss, result.aux) == (None, None)
    assert (float(result.grad_norm), float(result.scale), bool(result.skipped)) == (3.0, 8.0, False)
    assert (int(result.step), float(result.weight)) == (5, 5.0)


def test_s17_one_sentence_raised_or_warned() -> None:
    scaler = LossScaler(init_scale=1.0, min_scale=1.0, patience=2)
    text = stuck_scale.stuck_message(2, scaler, ["a/kernel", "b"])
    assert text.startswith("2 steps in a row were skipped although the loss scale is at its floor of 1: ")
    assert "inf or NaN gradients: a/kernel, b." in text
    with pytest.raises(LossScaleStuckError, match=r"2 steps in a row .* gradients: a/kernel"):
        stuck_scale.check_stuck(2, scaler, lambda: ["a/kernel"])
    found = stuck_scale.StuckFinding(("a/kernel",), True, "find()")
    with pytest.raises(
        LossScaleStuckError, match=r"a/kernel\. The loss is finite: the backward pass breaks\."
    ) as caught:
        stuck_scale.check_stuck(2, scaler, lambda: found)
    assert (caught.value.parameters, caught.value.loss_is_finite, caught.value.call) == found
    with pytest.warns(UserWarning, match="50 steps in a row") as said:
        stuck_scale.check_stuck(50, LossScaler(on_stuck="warn"), list, stacklevel=2)
    assert said[0].filename == __file__


def test_s17_nothing_is_said_and_no_name_looked_for_before_patience_or_where_it_is_ignored() -> None:
    asked: list[None] = []
    stuck_scale.check_stuck(1, LossScaler(init_scale=1.0, min_scale=1.0, patience=2), lambda: asked.append(None) or [])
    stuck_scale.check_stuck(99, LossScaler(on_stuck="ignore"), lambda: asked.append(None) or [])
    assert asked == []


def test_s17_of_states_that_share_a_watch_and_take_turns_none_is_passed_over() -> None:
    for patience in range(1, 13):
        scaler = LossScaler(patience=patience)
        for states in range(1, patience + 1):
            watch = stuck_scale.StuckScaleMonitor(shared=True)
            looked = [number for number in range(2 * patience**3 + 9) if watch.is_due(scaler)]
            assert {number % states for number in looked} == set(range(states)), (patience, states)
            assert looked[0] == patience - 1
            assert max(after - before for before, after in itertools.pairwise(looked)) <= patience + 1


def test_s17_nobody_looks_where_nothing_is_checked() -> None:
    for scaler in (LossScaler.off(), LossScaler(on_stuck="ignore", patience=1)):
        watch = stuck_scale.StuckScaleMonitor()
        assert not any(watch.is_due(scaler) for _ in range(200))

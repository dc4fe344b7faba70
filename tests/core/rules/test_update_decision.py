"""S9 to S14 over two verbs: a framework of plain numbers, whose calls are written down."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest

from polyamp import LossScaler, LossScaleStuckError
from polyamp.reference.arrays import XP
from polyamp.rules import stuck_scale, update_decision
from polyamp.rules.loss_scale import LossScaleState
from polyamp.rules.update_decision import GradStats, UpdateDecision


class Toy(NamedTuple):
    """A state whose parameter is one number."""

    name: str
    value: float
    scaler: LossScaler
    scale_state: LossScaleState
    step: Any


class ToyVerbs(update_decision.UpdateHooks[Toy, float]):
    """Measures a number and subtracts it."""

    xp = XP

    def __init__(self) -> None:
        self.log: list[str] = []

    def scaler(self, state: Toy) -> LossScaler:
        return state.scaler

    def measure(self, state: Toy, grads: float) -> GradStats:
        self.log.append(f"measure {state.name}")
        return GradStats(np.float32(abs(grads)), np.asarray(np.isfinite(grads)))

    def commit(self, state: Toy, grads: float, measured: GradStats, decision: UpdateDecision) -> Toy:
        applied = decision.finite is None or bool(decision.finite)
        self.log.append(f"commit {state.name} {applied}")
        value = state.value - grads if applied else state.value
        return state._replace(value=value, scale_state=decision.scale_state, step=decision.step)


def toy(name: str, scaler: LossScaler) -> Toy:
    return Toy(name, 1.0, scaler, scaler.init("reference"), np.asarray(0, np.int32))


def test_s09_everything_is_measured_before_anything_is_committed() -> None:
    scaler, verbs = LossScaler(init_scale=8.0), ToyVerbs()
    update_decision.apply_update([toy("a", scaler), toy("b", scaler)], [0.5, 0.25], "all", verbs)
    assert verbs.log == ["measure a", "measure b", "commit a True", "commit b True"]


@pytest.mark.parametrize(("skip", "values", "steps"), [("all", [1.0, 1.0], [0, 0]), ("each", [0.5, 1.0], [1, 0])])
def test_s14_one_overflow_and_one_adjustment(skip: Any, values: list[float], steps: list[int]) -> None:
    scaler = LossScaler(init_scale=8.0)
    states, results = update_decision.apply_update(
        [toy("a", scaler), toy("b", scaler)], [0.5, np.inf], skip, ToyVerbs()
    )
    assert [state.value for state in states] == values
    assert [int(state.step) for state in states] == steps == [int(result.step) for result in results]
    assert [float(result.scale) for result in results] == [4.0, 4.0]
    assert [int(state.scale_state.skipped) for state in states] == [1, 1]
    assert [bool(result.skipped) for result in results] == [step == 0 for step in steps]


def test_s19_where_nothing_is_checked_the_update_is_always_applied() -> None:
    (state,), (result,) = update_decision.apply_update([toy("a", LossScaler.off())], [np.nan], "all", ToyVerbs())
    assert np.isnan(state.value)
    assert not bool(result.skipped)
    assert int(result.step) == 1
    assert float(result.scale) == 1.0


def test_s17_one_sentence_raised_or_warned() -> None:
    scaler = LossScaler(init_scale=1.0, min_scale=1.0, patience=2)
    text = stuck_scale.stuck_message(2, scaler, ["a/kernel", "b"])
    assert text.startswith("2 steps in a row were skipped although the loss scale is at its floor of 1: ")
    assert "inf or NaN gradients: a/kernel, b." in text
    with pytest.raises(LossScaleStuckError, match=r"2 steps in a row .* gradients: a/kernel"):
        stuck_scale.check_stuck(2, scaler, lambda: ["a/kernel"])
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

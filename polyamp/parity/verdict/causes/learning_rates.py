"""`rate_cause`: which schedule or bias correction makes two updates of the same direction differ in size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

from polyamp.parity.verdict.causes.cause import Cause
from polyamp.parity.verdict.causes.step_facts import StepFacts, is_near
from polyamp.parity.verdict.causes.update_rule import UpdateRule
from polyamp.schedules import is_schedule

_MIN_CHANGE: Final = 3e-3
"""Least relative difference of two rates."""
_DECAY_TOLERANCE: Final = 0.02
"""Largest relative difference of a decay from what is missing of an update, at which the decay explains it."""
_BOTH, _FIRST, _SECOND = "both moments", "the first moment", "the second moment"


def rate_cause(facts: StepFacts, rules: tuple[UpdateRule, UpdateRule]) -> Cause | None:
    """Return why one side's update is a multiple of the other's; None if it is not.

    Args:
        facts: what is known about the step.
        rules: formulas of both updates.
    """
    one, two = rules
    if not one.rate or not two.rate or one.rates or two.rates or not (one.is_known and two.is_known):
        return None
    ratio = two.rate / one.rate
    if abs(ratio - 1.0) <= max(_MIN_CHANGE, one.residual, two.residual):
        return None
    evidence = [f"{facts.labels[1]}'s update is {ratio:.5g} times {facts.labels[0]}'s."]
    decays = [abs(rule.decay / rule.rate) for rule in rules]
    scales_decay = max(decays) * one.parameter_size > _MIN_CHANGE and is_near(decays[0], decays[1], 0.02)
    correction = None if scales_decay else _bias_correction(facts, ratio, evidence)
    return (
        correction
        or _decay_behind_update(facts, rules, evidence)
        or _schedule(facts, ratio, evidence)
        or _plain_rate(facts, evidence)
    )


def _bias_correction(facts: StepFacts, ratio: float, evidence: list[str]) -> Cause | None:
    """Return which bias correction one side lacks: it changes the update, and not the decoupled decay."""
    if facts.moments[0].slot != "exp_avg":
        return None
    first, second = 1.0 - facts.betas[0] ** facts.step, math.sqrt(1.0 - facts.betas[1] ** facts.step)
    for growth, words in ((first / second, _BOTH), (first, _FIRST), (1.0 / second, _SECOND)):
        for side, factor in ((1, growth), (0, 1.0 / growth)):
            if is_near(ratio, factor):
                betas = f"{facts.betas[0]:.6g} and {facts.betas[1]:.6g}"
                text = f"Without it an update of betas {betas} is {growth:.5g} times as large at step {facts.step}."
                return Cause("formula", f"{facts.labels[side]} has no bias correction of {words}.", [*evidence, text])
    for count, words in ((facts.step + 1, "ahead"), (facts.step - 1, "behind")):
        for side, times in ((1, ratio), (0, 1.0 / ratio)):
            if count and is_near(times, _correction(facts, count) / _correction(facts, facts.step)):
                text = (
                    f"The correction of step {count} makes an update {times:.5g} times as large at step {facts.step}."
                )
                label = facts.labels[side]
                return Cause("formula", f"{label}'s bias correction is one step {words}.", [*evidence, text])
    return None


def _correction(facts: StepFacts, count: int) -> float:
    """Return by what the bias correction of a step multiplies an update."""
    return math.sqrt(1.0 - facts.betas[1] ** count) / (1.0 - facts.betas[0] ** count)


def _decay_behind_update(facts: StepFacts, rules: tuple[UpdateRule, UpdateRule], evidence: list[str]) -> Cause | None:
    """Return that one side decays what it has updated: `1 - rate * decay` is left of its update."""
    ratio = rules[1].rate / rules[0].rate
    for side, times in ((1, ratio), (0, 1.0 / ratio)):
        decay = rules[side].decay
        if decay > 0.0 and is_near(1.0 - times, decay, _DECAY_TOLERANCE):
            label, other = facts.labels[side], facts.labels[1 - side]
            text = f"{label} takes {decay:.4g} times the parameter from it, and leaves {times:.5g} times the update."
            sentence = f"{label} takes the decoupled weight decay behind the update, {other} before it."
            return Cause("formula", sentence, [*evidence, text])
    return None


def _schedule(facts: StepFacts, ratio: float, evidence: list[str]) -> Cause | None:
    """Return how one side reads the other's schedule."""
    for side, recipe in enumerate(facts.recipes):
        schedule = None if recipe is None else getattr(recipe.optimizer, "learning_rate", None)
        if not is_schedule(schedule):
            continue
        label, own = facts.labels[1 - side], float(schedule(facts.step - 1))
        times = ratio if side == 0 else 1.0 / ratio
        for rate, words in _misread_rates(schedule, facts.step):
            if own and is_near(times, rate / own):
                text = f"The schedule's rate at step {facts.step} is {own:.4g}; {rate:.4g} explains the difference."
                return Cause("formula", f"{label}'s learning-rate schedule {words}.", [*evidence, text])
        text = f"{label}'s learning rate is {times:.5g} times the schedule's at step {facts.step}, {own:.4g}."
        return Cause("formula", text, evidence)
    return None


def _misread_rates(schedule: Any, step: int) -> Iterator[tuple[float, str]]:
    """Yield rates of a schedule that is read in a wrong way, with words."""
    count, name = step - 1, type(schedule).__name__
    yield float(schedule(count + 1)), "is one step early: its first update has the rate of the second"
    if count:
        yield float(schedule(count - 1)), "is one step late"
    for field in schedule.field_names:
        value = getattr(schedule, field)
        if isinstance(value, int) and not isinstance(value, bool) and value > 1:
            for changed, sign in ((value - 1, "- 1"), (value + 1, "+ 1")):
                other = schedule.replace(**{field: changed})
                yield float(other(count)), f"({name}) runs over {field} {sign}: {changed} for {value}"
    peak = getattr(schedule, "peak", None)
    if isinstance(peak, float):
        yield peak, "is not applied: the rate is the peak's"


def _plain_rate(facts: StepFacts, evidence: list[str]) -> Cause:
    before = f" The updates agreed until step {facts.step - 1}: another schedule." if facts.step > 1 else ""
    return Cause("formula", f"Another learning rate.{before}", [f"{evidence[0][:-1]}, in all directions."])

"""Causes that change what an optimizer makes of equal moments: epsilon, groups, Nesterov, rate, decoupled decay."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

from polyamp.parity.verdict.causes.cause import Cause
from polyamp.parity.verdict.causes.step_facts import StepFacts, is_near, parameter_names
from polyamp.parity.verdict.causes.update_rule import UpdateRule, update_rule
from polyamp.schedules import is_schedule

_USUAL_MOMENTA: Final = (0.9, 0.95, 0.99, 0.8, 0.5)
_EQUAL_RATES: Final = 0.05
"""Largest relative difference of two rates beside which an epsilon is the cause."""
_GROUP_TOLERANCE: Final = 0.05
"""Least difference of a parameter's rate or decay, relative to the largest."""
_MIN_CHANGE: Final = 3e-3
"""Least relative difference of two rates."""
_DECAY_TOLERANCE: Final = 0.02
"""Largest relative difference of a decay from what is missing of an update, at which the decay explains it."""
_BOTH, _FIRST, _SECOND = "both moments", "the first moment", "the second moment"


def other_update(facts: StepFacts) -> Cause | None:
    """Return by what two updates of equal moments differ."""
    given = facts.hyperparameter("eps")
    epsilons = [given] if isinstance(given, float) else []
    one, two = (update_rule(side, epsilons) for side in facts.sides)
    if one is None or two is None:
        return None
    are_known = one.is_known and two.is_known
    checks = (_amsgrad, _epsilon, _groups, _nesterov, _rate, _decoupled_decay) if are_known else (_groups, _nesterov)
    return next((found for check in checks if (found := check(facts, one, two)) is not None), None)


def _amsgrad(facts: StepFacts, one: UpdateRule, two: UpdateRule) -> Cause | None:
    if one.is_maximum == two.is_maximum:
        return None
    number = 0 if one.is_maximum else 1
    label, other = facts.labels[number], facts.labels[1 - number]
    return Cause(
        "formula",
        f"{label} divides by the largest second moment of all steps so far (AMSGrad), {other} by this step's.",
        [f"With the largest all but {(one, two)[number].residual:.1e} of {label}'s update is explained."],
    )


def _epsilon(facts: StepFacts, one: UpdateRule, two: UpdateRule) -> Cause | None:
    if one.is_inside == two.is_inside and is_near(one.epsilon, two.epsilon, 0.2):
        return None
    if not is_near(one.rate, two.rate, _EQUAL_RATES):
        return None  # the epsilons are too small to explain it
    correction = (1.0 - facts.betas[1] ** facts.step) ** 0.5 if facts.moments[0].slot == "exp_avg" else 1.0
    texts = []
    for label, rule in zip(facts.labels, (one, two), strict=True):
        place = "inside the root" if rule.is_inside else "added to the root"
        value = rule.epsilon / (correction**2 if rule.is_inside else correction)
        texts.append(f"about {value:.2g} {place} in {label}" if value else f"none that shows in {label}")
    return Cause(
        "epsilon",
        f"Another epsilon of the optimizer: {', '.join(texts)}.",
        ["Elements with a small second moment are moved by another amount, those with a large one alike."],
    )


def _groups(facts: StepFacts, one: UpdateRule, two: UpdateRule) -> Cause | None:
    """Return that some parameters have another rate or decay."""
    if not (one.rates or two.rates):
        return None
    keys = sorted(set(facts.sides[0].before) & set(facts.sides[1].before))
    rates = [{key: rule.rates.get(key, rule.rate) for key in keys} for rule in (one, two)]
    decays = [{key: rule.decays.get(key, rule.decay) for key in keys} for rule in (one, two)]
    for word, sides in (("learning rate", rates), ("weight decay", decays)):
        largest = max((abs(each) for side in sides for each in side.values()), default=0.0)
        other = [key for key in keys if abs(sides[0][key] - sides[1][key]) > _GROUP_TOLERANCE * largest]
        if other and len(other) < len(keys):
            values = sides[0][other[0]], sides[1][other[0]]
            return Cause(
                "formula",
                f"Another {word} for {len(other)} of {len(keys)} parameters: {parameter_names(other)}.",
                [f"Of {parameter_names(other[:1])} in a step: {facts.pair(values)}; the others have the same."],
            )
    return None


def _nesterov(facts: StepFacts, one: UpdateRule, two: UpdateRule) -> Cause | None:
    if facts.moments[0].slot != "momentum" or not one.rate or not two.rate:
        return None
    ratio = two.rate / one.rate
    larger = 1 if abs(ratio) > 1 else 0
    if facts.step > 1:
        sizes = [abs(rule.nesterov / rule.rate) for rule in (one, two)]
        if max(sizes) < 0.2 or min(sizes) > 0.02:
            return None
        larger = sizes.index(max(sizes))
        evidence = f"Its update has {(one, two)[larger].nesterov:.3g} times the gradient in it, besides the momentum."
    else:
        given = facts.hyperparameter("momentum")
        known = [given] if isinstance(given, float) and given else _USUAL_MOMENTA
        times = ratio if larger else 1.0 / ratio
        found = next((each for each in known if is_near(times, 1.0 + each)), None)
        if found is None:
            return None
        evidence = f"Its first update is {times:.5g} times the other's, and 1 + momentum is {1 + found:.5g}."
    label, other = facts.labels[larger], facts.labels[1 - larger]
    return Cause("formula", f"{label} uses Nesterov's momentum, {other} does not.", [evidence])


def _decoupled_decay(facts: StepFacts, one: UpdateRule, two: UpdateRule) -> Cause | None:
    sizes = abs(one.decay), abs(two.decay)
    larger = max(sizes)
    least = max(3 * one.residual, 3 * two.residual, 1e-4) / (one.parameter_size or 1.0)
    if not larger or abs(one.decay - two.decay) <= max(0.02 * larger, least):
        return None
    evidence = [f"Taken from the parameter in a step (rate x decay): {facts.pair((one.decay, two.decay))}."]
    ratio, rate = (two.decay / one.decay if one.decay else 0.0), facts.rate
    if rate and ratio and is_near(max(ratio, 1 / ratio), 1 / rate, 0.02):
        label = facts.labels[1 if ratio > 1 else 0]
        text = f"{label} does not multiply its weight decay by the learning rate ({rate:.3g})."
        return Cause("formula", text, evidence)
    if min(sizes) < 1e-3 * larger:
        label = facts.labels[sizes.index(larger)]
        return Cause("formula", f"Only {label} takes a decoupled weight decay from the parameters.", evidence)
    times = f"{facts.labels[1]}'s is {ratio:.4g} times {facts.labels[0]}'s"
    return Cause("formula", f"Another decoupled weight decay: {times}.", evidence)


def _rate(facts: StepFacts, one: UpdateRule, two: UpdateRule) -> Cause | None:
    """Return why one side's update is a multiple of the other's: a schedule, a bias correction."""
    if not one.rate or not two.rate or one.rates or two.rates:
        return None
    ratio = two.rate / one.rate
    if abs(ratio - 1.0) <= max(_MIN_CHANGE, one.residual, two.residual):
        return None
    evidence = [f"{facts.labels[1]}'s update is {ratio:.5g} times {facts.labels[0]}'s."]
    decays = [abs(rule.decay / rule.rate) for rule in (one, two)]
    scales_decay = max(decays) * one.parameter_size > _MIN_CHANGE and is_near(decays[0], decays[1], 0.02)
    correction = None if scales_decay else _bias_correction(facts, ratio, evidence)
    return (
        correction
        or _decay_behind_update(facts, (one, two), evidence)
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

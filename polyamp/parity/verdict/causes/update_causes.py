"""Causes that change what an optimizer makes of equal moments: epsilon, groups, Nesterov, rate, decoupled decay."""

from __future__ import annotations

from typing import Final

from polyamp.parity.verdict.causes.cause import Cause
from polyamp.parity.verdict.causes.learning_rates import rate_cause
from polyamp.parity.verdict.causes.step_facts import StepFacts, is_near, parameter_names
from polyamp.parity.verdict.causes.update_rule import UpdateRule, update_rule

_USUAL_MOMENTA: Final = (0.9, 0.95, 0.99, 0.8, 0.5)
_EQUAL_RATES: Final = 0.05
"""Largest relative difference of two rates beside which an epsilon is the cause."""
_GROUP_TOLERANCE: Final = 0.05
"""Least difference of a parameter's rate or decay, relative to the largest."""


def other_update(facts: StepFacts) -> Cause | None:
    """Return by what two updates of equal moments differ."""
    given = facts.hyperparameter("eps")
    epsilons = [given] if isinstance(given, float) else []
    one, two = (update_rule(side, epsilons) for side in facts.sides)
    if one is None or two is None:
        return None
    return (
        _amsgrad(facts, one, two)
        or _epsilon(facts, one, two)
        or _groups(facts, one, two)
        or _nesterov(facts, one, two)
        or rate_cause(facts, (one, two))
        or _decoupled_decay(facts, one, two)
    )


def _amsgrad(facts: StepFacts, one: UpdateRule, two: UpdateRule) -> Cause | None:
    if not (one.is_known and two.is_known) or one.is_maximum == two.is_maximum:
        return None
    number = 0 if one.is_maximum else 1
    label, other = facts.labels[number], facts.labels[1 - number]
    return Cause(
        "formula",
        f"{label} divides by the largest second moment of all steps so far (AMSGrad), {other} by this step's.",
        [f"With the largest all but {(one, two)[number].residual:.1e} of {label}'s update is explained."],
    )


def _epsilon(facts: StepFacts, one: UpdateRule, two: UpdateRule) -> Cause | None:
    if not (one.is_known and two.is_known):
        return None
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
    if not (one.is_known and two.is_known):
        return None
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

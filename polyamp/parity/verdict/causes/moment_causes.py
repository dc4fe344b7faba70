"""Causes that change what an optimizer's moments are made of: other gradients, decay in the gradient, momentum."""

from __future__ import annotations

from polyamp.parity.verdict.causes.cause import Cause
from polyamp.parity.verdict.causes.step_facts import TOLERANCE, StepFacts, is_near, parameter_names
from polyamp.parity.verdict.causes.update_rule import (
    MomentRule,
    second_moment_factor,
    stale_gradient_factor,
    update_rule,
)


def frozen_parameters(facts: StepFacts) -> Cause | None:
    """Return that one side does not move some parameters."""
    still = [
        {key for key in side.before if side.gradients[key].any() and not (side.after[key] - side.before[key]).any()}
        for side in facts.sides
    ]
    for number in (0, 1):
        alone = sorted(still[number] - still[1 - number])
        count = len(facts.sides[number].before)
        if alone and len(alone) < count:
            return Cause(
                "formula",
                f"{facts.labels[number]} does not train {len(alone)} of {count} parameters: they did not move, though "
                "they have a gradient.",
                [f"Not moved: {parameter_names(alone)}. Are they frozen, or not given to the optimizer?"],
            )
    return None


def other_gradient(facts: StepFacts) -> Cause | None:
    """Return that one side's moment is not made of the gradient of the batch."""
    known = [rule.is_known for rule in facts.moments]
    if known[0] == known[1]:
        return None
    number = known.index(False)
    rule, label = facts.moments[number], facts.labels[number]
    return Cause(
        "formula",
        f"{label}'s optimizer is given another gradient than that of the batch: of a part of its rows (cleared between "
        "micro-batches?), or changed element by element.",
        [f"No combination of gradient and parameter gives {label}'s {rule.slot}: {rule.residual:.2g} of it is left."],
    )


def stale_gradient(facts: StepFacts) -> Cause | None:
    """Return that one side adds the gradient of the step before."""
    for number in (0, 1):
        rule = facts.moments[1 - number]
        factor = stale_gradient_factor(facts.sides[number], rule) if rule.slot and rule.is_known else None
        if factor is not None and rule.gradient and is_near(factor, rule.gradient, 0.01):
            times = factor / rule.gradient
            return Cause(
                "formula",
                f"{facts.labels[number]} adds the gradient of the step before: gradients are not cleared (zero_grad).",
                [f"Its {rule.slot} has {times:.4g} times the gradient of step {facts.step - 1} in it too."],
            )
    return None


def dampening(facts: StepFacts) -> Cause | None:
    """Return that another share of gradient and decay is added to the moment, from the second step on."""
    one, two = facts.moments
    if facts.step < 2 or not (one.is_known and two.is_known) or not (one.gradient and one.decay and two.decay):
        return None
    ratios = two.gradient / one.gradient, two.decay / one.decay
    if is_near(ratios[0], 1.0, facts.moment_tolerance) or not is_near(*ratios, 0.01):
        return None
    return Cause(
        "factor",
        "Another share of the gradient is added to the momentum: dampening, or an average where the other has a sum.",
        [f"Added at step {facts.step}: {facts.pair((one.gradient, two.gradient))} times the gradient."],
    )


def coupled_decay(facts: StepFacts) -> Cause | None:
    """Return that one side adds the weight decay to the gradient, and the other does not, or another one."""
    shares = [
        rule.decay / rule.gradient * facts.share(number) if rule.gradient else 0.0
        for number, rule in enumerate(facts.moments)
    ]
    sizes = list(map(abs, shares))
    larger, smaller = max(sizes), min(sizes)
    if not larger or abs(shares[0] - shares[1]) <= 10 * TOLERANCE * larger or not _has_visible_decay(facts):
        return None
    if smaller > 0.02 * larger:
        pair = facts.pair(shares)
        return Cause(
            "formula", "Both add a weight decay to the gradient, and another one.", [f"Of the parameter: {pair}."]
        )
    number = sizes.index(larger)
    label, other = facts.labels[number], facts.labels[1 - number]
    rule = update_rule(facts.sides[1 - number])
    taken = rule is not None and rule.is_known and abs(rule.decay) > 1e-3 * abs(rule.rate) * larger
    how = f"takes {rule.decay:.3g} times it from the parameter (decoupled)" if rule and taken else "has none"
    return Cause(
        "formula",
        f"{label} adds the weight decay to the gradient (coupled, L2), {other} {how}.",
        [f"{label}'s {facts.moments[number].slot} has {larger:.4g} times the parameter in it, {other}'s does not."],
    )


def _has_visible_decay(facts: StepFacts) -> bool:
    """Return whether the parameter's part of a moment is larger than the error of the fit."""
    for rule, side in zip(facts.moments, facts.sides, strict=True):
        sizes = [abs(side.before[key]).max() / (abs(side.gradients[key]).max() or 1.0) for key in side.before]
        if rule.gradient and abs(rule.decay / rule.gradient) * max(sizes, default=0.0) > 10 * TOLERANCE:
            return True
    return False


def momentum(facts: StepFacts) -> Cause | None:
    """Return that another part of the earlier moment is kept."""
    one, two = facts.moments
    if (
        facts.step < 2
        or not (one.is_known and two.is_known)
        or abs(one.momentum - two.momentum) <= facts.moment_tolerance
    ):
        return None
    pair = facts.pair((one.momentum, two.momentum))
    name = "first beta" if one.slot == "exp_avg" else "momentum"
    return Cause(
        "factor", f"Another {name}: {pair}.", [f"Of {one.slot} as it was, this part is kept at step {facts.step}."]
    )


def second_moment(facts: StepFacts) -> Cause | None:
    """Return that the mean of squares has another weight."""
    if facts.moments[0].slot != facts.moments[1].slot or facts.moments[0].slot == "momentum":
        return None
    alone = not facts.moments[0].slot  # of RMSprop
    rules = [MomentRule("", 1.0)] * 2 if alone else facts.moments
    found = [second_moment_factor(side, rule) for side, rule in zip(facts.sides, rules, strict=True)]
    shares = [1.0 if alone else facts.share(number) or 1.0 for number in (0, 1)]
    weights = [each[0] / share**2 for share, each in zip(shares, found, strict=True) if each is not None]
    if len(weights) < 2 or is_near(weights[0], weights[1], 0.01):
        return None
    name = "alpha" if alone else "second beta"
    pair = facts.pair([1.0 - weight for weight in weights])
    return Cause("factor", f"Another {name}: {pair}.", [f"Of the squared gradient is added: {facts.pair(weights)}."])

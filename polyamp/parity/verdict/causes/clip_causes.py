"""Causes that change the size of gradients: clipping by value, per parameter or before unscaling, and micro-batches."""

from __future__ import annotations

from typing import Final

from polyamp.parity.verdict.causes.cause import Cause
from polyamp.parity.verdict.causes.step_facts import MIN_CLIP, TOLERANCE, StepFacts, is_near

_CLIP_EPSILON: Final = 1e-6
"""What torch.nn.utils.clip_grad_norm_ adds to the norm."""
_MAX_MICRO_BATCHES: Final = 64
_SCALE_FACTOR: Final = 2.0
"""By which loss scales grow and back off, unless a recipe says otherwise."""


def clip_by_value(facts: StepFacts) -> Cause | None:
    """Return that one side clips each element, or that both do at other limits."""
    limits = [rule.limit for rule in facts.moments]
    if None not in limits:
        known = [limit for limit in limits if limit is not None]
        if is_near(*known):
            return None
        return Cause("formula", f"Both clip the gradient by value, at other limits: {facts.pair(known)}.", [])
    number = 1 if limits[0] is None else 0
    limit = limits[number]
    if limit is None:
        return None
    label, other = facts.labels[number], facts.labels[1 - number]
    norm = facts.clipped_norm(1 - number) if facts.moments[1 - number].is_known else None
    how = "does not" if norm is None else f"clips to the global norm {norm:.4g}"
    return Cause(
        "formula",
        f"{label} clips its gradient by value, {other} {how}.",
        [f"{label}'s optimizer is given no element larger than {limit:.4g}; the smaller ones are as they were."],
    )


def clip_per_parameter(facts: StepFacts) -> Cause | None:
    """Return that one side clips each parameter's gradient by its own norm."""
    for number in (0, 1):
        rule, side = facts.moments[number], facts.sides[number]
        if not rule.factors or facts.moments[1 - number].factors:
            continue
        whole = rule.gradient / (facts.share(number) or 1.0)
        norms = {key: factor / whole * side.norms[key] for key, factor in rule.factors.items()}
        clipped = sorted(norm for key, norm in norms.items() if norm < (1.0 - MIN_CLIP) * side.norms[key])
        if not clipped:
            continue
        limit = clipped[len(clipped) // 2]
        if clipped[-1] - clipped[0] <= 10 * TOLERANCE * limit:
            label, other = facts.labels[number], facts.labels[1 - number]
            norm = facts.clipped_norm(1 - number)
            how = "" if norm is None else f"; {other} clips by the norm of all together, to {norm:.4g}"
            return Cause(
                "formula",
                f"{label} clips the gradient of each parameter by its own norm{how}.",
                [f"The gradients of {len(clipped)} parameters have norm {limit:.4g} each: clipped per parameter."],
            )
    return None


def gradient_factor(facts: StepFacts) -> Cause | None:
    """Return why all gradients of one side are a multiple of the other's."""
    one, two = facts.moments
    if not one.gradient or not two.gradient or one.factors or two.factors:
        return None
    ratio = two.gradient / one.gradient
    larger = 1 if abs(ratio) > 1 else 0
    times = ratio if larger else 1.0 / ratio
    evidence = [f"The gradient in {facts.labels[larger]}'s {one.slot or 'update'} is {times:.7g} times the other's."]
    if abs(times - 1.0) <= facts.moment_tolerance / 3:
        return _clip_epsilon(facts, larger, times, evidence)
    return (
        _clip_epsilon(facts, larger, times, evidence)
        or _loss_scale(facts, larger, times, evidence)
        or _micro_batches(facts, larger, times, evidence)
        or _clip_norm(facts, larger, times, evidence)
    )


def _clip_epsilon(facts: StepFacts, larger: int, times: float, evidence: list[str]) -> Cause | None:
    if facts.clipped_norm(0) is None or facts.clipped_norm(1) is None:
        return None
    norm = facts.global_norm
    if abs(times - 1.0 - _CLIP_EPSILON / norm) > 0.2 * _CLIP_EPSILON / norm:
        return None
    label, other = facts.labels[larger], facts.labels[1 - larger]
    return Cause(
        "formula",
        f"{other} adds 1e-06 to the norm by which it clips (as torch does), {label} does not.",
        [*evidence, f"The norm is {norm:.4g}, and 1 + 1e-06 / {norm:.4g} is {1 + _CLIP_EPSILON / norm:.7g}."],
    )


def _loss_scale(facts: StepFacts, larger: int, times: float, evidence: list[str]) -> Cause | None:
    label, other = facts.labels[larger], facts.labels[1 - larger]
    for scale in sorted({side.numbers.get("scale", 0.0) for side in facts.sides}):
        if scale <= 1.0 or not is_near(times, scale):
            continue
        clips = any(recipe is not None and any(recipe.clip) for recipe in facts.recipes)
        if clips or facts.clipped_norm(larger) is not None:
            sentence = f"{other} clips its gradients before it unscales them, which makes them 1 / scale too small."
        else:
            sentence = f"{label}'s gradients are not unscaled, or {other}'s are unscaled twice."
        return Cause("factor", sentence, [*evidence, f"The loss scale is {scale:.6g}."])
    return None


def _micro_batches(facts: StepFacts, larger: int, times: float, evidence: list[str]) -> Cause | None:
    if facts.clipped_norm(0) is not None or facts.clipped_norm(1) is not None:
        return None
    parts = {recipe.accumulate_steps for recipe in facts.recipes if recipe is not None} - {1}
    is_open = not facts.is_plain and None in facts.recipes  # a recipe divides by the number that it says
    for count in parts or (range(2, _MAX_MICRO_BATCHES + 1) if is_open else ()):
        if is_near(times, count):
            return Cause(
                "factor",
                f"{facts.labels[larger]} adds the gradients of {count} micro-batches (or rows) and does not divide "
                f"them by {count}{_adjacent_scale(facts, larger, larger, times)}.",
                [*evidence, f"accumulate_steps is {count}."] if parts else evidence,
            )
    return None


def _adjacent_scale(facts: StepFacts, side: int, larger: int, times: float) -> str:
    """Return, as the end of a sentence, that a loop may unscale by the loss scale of another step; "" if it cannot."""
    scales = any(side.numbers.get("scale", 1.0) > 1.0 for side in facts.sides)
    if facts.recipes[side] is not None or not scales or not is_near(times, _SCALE_FACTOR):
        return ""
    return f"; or {facts.labels[side]} divides them by {'half' if side == larger else 'twice'} the loss scale"


def _clip_norm(facts: StepFacts, larger: int, times: float, evidence: list[str]) -> Cause | None:
    norms = facts.clipped_norm(0), facts.clipped_norm(1)
    text = f"The norm of all gradients of the pass is {facts.global_norm:.4g}."
    if norms[0] is not None and norms[1] is not None:
        pair = facts.pair((norms[0], norms[1]))
        return Cause("factor", f"Both clip by the global norm, to other limits: {pair}.", [*evidence, text])
    for number, norm in enumerate(norms):
        if norm is not None and is_near(facts.share(1 - number), 1.0):
            label, other = facts.labels[number], facts.labels[1 - number]
            clip = f"{label} clips its gradients to the global norm {norm:.4g}, {other} does not clip them"
            sentence = f"{clip}{_adjacent_scale(facts, number, larger, times)}."
            return Cause("factor", sentence, [*evidence, text])
    if facts.is_plain:
        return None  # it may be the learning rate
    sentence = (
        f"The optimizers are given gradients of other sizes: {facts.labels[larger]}'s are {times:.6g} times as large."
    )
    return Cause("factor", sentence, [*evidence, text])

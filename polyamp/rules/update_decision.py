"""S9 to S14: whether a step is applied or skipped, and the scale and counters after it.

A backend runs the second half of a step in this order:

    for every state: measure the gradients -> `GradStats`           S10, S11: reduced over replicas, unscaled
    for every state: `decide` -> `UpdateDecision`                   S13 to S15
                     commit the decision: clip, optimizer, running statistics where it is applied; new scale and step

Only this module decides whether a step is skipped.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from polyamp.array_namespace import ArrayNamespace
from polyamp.recipe.scaler import LossScaler, LossScaleState
from polyamp.results import StepResult

Skip = Literal["all", "each"]


class GradStats(NamedTuple):
    """Statistics of one state's gradients.

    Attributes:
        norm: global L2 norm of the unscaled gradients before clipping, scalar (S11).
        finite: whether all gradients are finite after unscaling, boolean scalar (S10).
        weight: count of the mean loss, scalar (S8); None if it cannot be 0.
    """

    norm: Any
    finite: Any
    weight: Any = None


class UpdateDecision(NamedTuple):
    """Result of the decision for one state.

    Attributes:
        finite: whether the update is applied, boolean scalar: the gradients are finite and the weight is not 0; None
            if neither is checked and the update is always applied.
        scale_state: the loss-scale state after the step.
        step: number of applied updates after the step.
        skipped: the negation of `finite`, boolean scalar.
    """

    finite: Any
    scale_state: LossScaleState
    step: Any
    skipped: Any

    def result(self, stats: GradStats) -> StepResult:
        """Return what the step reports, without loss and aux."""
        return StepResult(None, None, stats.norm, self.scale_state.scale, self.skipped, self.step, stats.weight)


def decide(
    scaler: LossScaler,
    scale_state: LossScaleState,
    step: Any,
    stats: GradStats,
    flags: Sequence[Any],
    skip: Skip,
    xp: ArrayNamespace,
) -> UpdateDecision:
    """Return the decision for one state, and its scale state and step count after it (S13 to S15), branch-free.

    A step with weight 0 leaves the scale unchanged and counts as skipped (S8).

    Args:
        scaler: the scaler of the states that step together.
        scale_state: the state's loss-scale state before the step.
        step: number of applied updates before the step, int32 scalar.
        stats: statistics of the state's gradients.
        flags: `GradStats.finite` of every state that steps together; the scale is adjusted once, by all of them (S14).
        skip: "all" skips every state if a flag is false, "each" only the state itself.
        xp: the framework's array namespace.
    """
    one = xp.asarray(1, step)
    applied, after = None, scale_state
    if scaler.checks:
        every = functools.reduce(operator.and_, flags)
        applied = every if skip == "all" else stats.finite
        after = scaler.next_state(scale_state, every, xp)
    if stats.weight is not None:
        counts = stats.weight > 0.0
        passed = scale_state._replace(skipped=scale_state.skipped + xp.asarray(1, scale_state.skipped))
        after = LossScaleState(*(xp.where(counts, new, old) for new, old in zip(after, passed, strict=True)))
        applied = counts if applied is None else applied & counts
    if applied is None:
        return UpdateDecision(None, scale_state, step + one, one < one)
    return UpdateDecision(applied, after, step + xp.where(applied, one, xp.asarray(0, step)), ~applied)

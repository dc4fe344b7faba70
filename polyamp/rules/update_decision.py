"""S9 to S14: the second half of a step, over two hooks of a framework, `measure` and `commit`.

    for every state: measure(gradients) -> norm, finite flag          S10, S11: reduced over replicas, unscaled
    every = all flags
    for every state: finite = every or its own (skip="all" / "each")  S14; None where the scaler checks nothing
                     counts = its weight is above 0                    S8; None where it does not depend on values
                     scale, step, skipped                              S13, S15: one adjustment, on `every`
                     commit: clip, optimizer, running statistics where finite, and the new scale and step

Only this module decides whether a step is skipped. A backend subclasses `UpdateHooks`. Where fewer operations suffice,
as in torch on the CPU, it overrides `next_scale_state`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from polyamp.array_namespace import ArrayNamespace
from polyamp.results import StepResult
from polyamp.rules import loss_scale as scales
from polyamp.rules.loss_scale import LossScaleState

Skip = Literal["all", "each"]


class UpdateScaler(scales.ScalerConstants, Protocol):
    """Fields of a `LossScaler` that the decision reads."""

    @property
    def checks(self) -> bool:
        """Whether steps with non-finite gradients are skipped."""


class StateCounters(Protocol):
    """Fields of a state that the decision reads."""

    @property
    def scale_state(self) -> LossScaleState:
        """The loss-scale state before the step."""

    @property
    def step(self) -> Any:
        """Applied updates before the step, int32 scalar."""


S = TypeVar("S", bound=StateCounters)
G = TypeVar("G")


class GradStats(NamedTuple):
    """Statistics of one state's gradients, from `measure`.

    Attributes:
        norm: global L2 norm of the unscaled gradients before clipping, scalar (S11).
        finite: whether all gradients are finite after unscaling, boolean scalar (S10).
        more: backend-specific values passed on to `commit`, such as the unscaled gradients or the divisor.
        weight: count of the mean loss, scalar (S8); None if it cannot be 0.
    """

    norm: Any
    finite: Any
    more: Any = None
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


class UpdateHooks(ABC, Generic[S, G]):
    """Framework-specific hooks of the second half of a step.

    Attributes:
        xp: the framework's array namespace.
    """

    xp: ArrayNamespace

    @abstractmethod
    def scaler(self, state: S) -> UpdateScaler:
        """Return the loss scaler of a state's recipe."""

    @abstractmethod
    def measure(self, state: S, grads: G) -> GradStats:
        """Return norm and finite flag of one state's gradients, on the device."""

    @abstractmethod
    def commit(self, state: S, grads: G, measured: GradStats, decision: UpdateDecision) -> S:
        """Return the new state with the decision's scale and step. Clipped gradients are applied if
        `decision.finite`; else the rest of the state stays bit for bit the same (S12)."""

    def all_finite(self, flags: Sequence[Any]) -> Any:
        """Return whether all flags are true, as a boolean scalar."""
        together = flags[0]
        for flag in flags[1:]:
            together = together & flag
        return together

    def next_scale_state(self, state: S, finite: Any, every: Any, counts: Any = None) -> UpdateDecision:
        """Return the counters and the scale after the step."""
        return next_scale_state(self.scaler(state), state.scale_state, state.step, finite, every, self.xp, counts)


def apply_update(
    states: Sequence[S], grads: Sequence[G], skip: Skip, verbs: UpdateHooks[S, G]
) -> tuple[list[S], list[StepResult]]:
    """Combine the flags, update every state and return what to report. All states have one scaler.

    Args:
        states: one or several states (S14).
        grads: gradients of each.
        skip: "all" or "each".
        verbs: the framework's hooks.

    Returns:
        The states after the step, and a `StepResult` without a loss for each.
    """
    measured = [verbs.measure(state, item) for state, item in zip(states, grads, strict=True)]
    every = verbs.all_finite([found.finite for found in measured])
    after, results = [], []
    for state, item, found in zip(states, grads, measured, strict=True):
        checks = verbs.scaler(state).checks
        finite = (every if skip == "all" else found.finite) if checks else None
        counts = None if found.weight is None else found.weight > 0.0
        decision = verbs.next_scale_state(state, finite, every, counts)
        after.append(verbs.commit(state, item, found, decision))
        scale, skipped, step = decision.scale_state.scale, decision.skipped, decision.step
        results.append(StepResult(None, None, found.norm, scale, skipped, step, found.weight))
    return after, results


def next_scale_state(
    scaler: UpdateScaler,
    scale_state: LossScaleState,
    step: Any,
    finite: Any,
    every: Any,
    xp: ArrayNamespace,
    counts: Any = None,
) -> UpdateDecision:
    """Return the scale, step count and decision of one state after a step (S13, S15), branch-free.

    Args:
        scaler: its constants.
        scale_state: loss-scale state before the step.
        step: number of applied updates before the step.
        finite: whether this state's gradients are finite; None if nothing is checked.
        every: whether no state overflowed; this adjusts the scale (S14).
        xp: the framework's array namespace.
        counts: whether the weight of the batch is above 0; None if it cannot be 0. A step with weight 0 leaves the
            scale unchanged and counts as skipped.
    """
    one, zero = xp.asarray(1, step), xp.asarray(0, step)
    if finite is None and counts is None:
        return UpdateDecision(None, scale_state, step + one, one < zero)
    moved = scales.update_scale(scaler, scale_state, every, xp) if scaler.checks else scale_state
    if counts is not None:
        passed = scale_state._replace(skipped=scale_state.skipped + xp.asarray(1, scale_state.skipped))
        moved = LossScaleState(*(xp.where(counts, new, old) for new, old in zip(moved, passed, strict=True)))
        finite = counts if finite is None else finite & counts
    return UpdateDecision(finite, moved, step + xp.where(finite, one, zero), ~finite)

"""S9 to S14: the second half of a step, over two verbs of a framework, `measure` and `commit`.

    for every state: measure(gradients) -> norm, finite flag          S10, S11: reduced over replicas, unscaled
    every = all flags
    for every state: finite = every or its own (skip="all" / "each")  S14; None where the scaler checks nothing
                     counts = its weight is above 0                    S8; None where it does not depend on values
                     scale, step, skipped                              S13, S15: one adjustment, on `every`
                     commit: clip, optimizer, running statistics where finite, and the new scale and step

Nothing else decides whether a step is skipped. A backend subclasses `Verbs`; where it can do with less, as torch on the
CPU, it overrides `concluded`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from polyamp.arrays import ArrayNamespace
from polyamp.results import StepResult
from polyamp.rules import scale as scales
from polyamp.rules.scale import LossScaleState

Skip = Literal["all", "each"]


class Scaler(scales.Constants, Protocol):
    """The fields of a `LossScaler` that decide."""

    @property
    def checks(self) -> bool:
        """Whether steps whose gradients are not finite are skipped."""


class Decided(Protocol):
    """What of a state decides."""

    @property
    def scale_state(self) -> LossScaleState:
        """The loss-scale state before the step."""

    @property
    def step(self) -> Any:
        """Applied updates before the step, int32 scalar."""


S = TypeVar("S", bound=Decided)
G = TypeVar("G")


class Measured(NamedTuple):
    """What `measure` found in one state's gradients.

    Attributes:
        norm: global L2 norm of the unscaled gradients before clipping, scalar (S11).
        finite: whether all of them are finite after unscaling, boolean scalar (S10).
        more: whatever the backend's `commit` can use again, such as unscaled gradients or the divisor.
        weight: what the mean of the loss is over, scalar (S8); None where it is not 0 whatever the batch holds.
    """

    norm: Any
    finite: Any
    more: Any = None
    weight: Any = None


class Decision(NamedTuple):
    """What becomes of one state.

    Attributes:
        finite: whether the update is applied, boolean scalar: the gradients are finite and the weight is not 0; None
            where neither is in question, and it always is.
        scale_state: the loss-scale state after the step.
        step: applied updates after the step.
        skipped: the contrary of `finite`, boolean scalar.
    """

    finite: Any
    scale_state: LossScaleState
    step: Any
    skipped: Any


class Verbs(ABC, Generic[S, G]):
    """What a framework does in the second half of a step.

    Attributes:
        xp: its array namespace.
    """

    xp: ArrayNamespace

    @abstractmethod
    def scaler(self, state: S) -> Scaler:
        """The loss scaler of a state's recipe."""

    @abstractmethod
    def measure(self, state: S, grads: G) -> Measured:
        """Norm and flag of one state's gradients, on the device."""

    @abstractmethod
    def commit(self, state: S, grads: G, measured: Measured, decision: Decision) -> S:
        """The state after: clipped gradients applied where `decision.finite`, else bit for bit as it was (S12), with
        the decision's scale and step."""

    def every(self, flags: Sequence[Any]) -> Any:
        """Whether all of the flags are true, boolean scalar."""
        together = flags[0]
        for flag in flags[1:]:
            together = together & flag
        return together

    def concluded(self, state: S, finite: Any, every: Any, counts: Any = None) -> Decision:
        """The counters and the scale after the step."""
        return concluded(self.scaler(state), state.scale_state, state.step, finite, every, self.xp, counts)


def update(states: Sequence[S], grads: Sequence[G], skip: Skip, verbs: Verbs[S, G]) -> tuple[list[S], list[StepResult]]:
    """Flags, and for every state its update and what to report. All states have one scaler.

    Args:
        states: one or several (S14).
        grads: of each.
        skip: "all" or "each".
        verbs: the framework's.

    Returns:
        The states after the step, and a `StepResult` without a loss for each.
    """
    measured = [verbs.measure(state, item) for state, item in zip(states, grads, strict=True)]
    every = verbs.every([found.finite for found in measured])
    after, results = [], []
    for state, item, found in zip(states, grads, measured, strict=True):
        checks = verbs.scaler(state).checks
        finite = (every if skip == "all" else found.finite) if checks else None
        counts = None if found.weight is None else found.weight > 0.0
        decision = verbs.concluded(state, finite, every, counts)
        after.append(verbs.commit(state, item, found, decision))
        scale, skipped, step = decision.scale_state.scale, decision.skipped, decision.step
        results.append(StepResult(None, None, found.norm, scale, skipped, step, found.weight))
    return after, results


def concluded(
    scaler: Scaler,
    scale_state: LossScaleState,
    step: Any,
    finite: Any,
    every: Any,
    xp: ArrayNamespace,
    counts: Any = None,
) -> Decision:
    """Scale, count and verdict of one state after a step (S13, S15), branch-free.

    Args:
        scaler: its constants.
        scale_state: before the step.
        step: applied updates before the step.
        finite: whether this state's gradients are finite; None where nothing is checked.
        every: whether no state overflowed, which moves the scale (S14).
        xp: the framework's array namespace.
        counts: whether the weight of the batch is above 0; None where that is not in question. A step without any
            weight says nothing of the scale, which stays, and is counted as skipped.
    """
    one, zero = xp.asarray(1, step), xp.asarray(0, step)
    if finite is None and counts is None:
        return Decision(None, scale_state, step + one, one < zero)
    moved = scales.update(scaler, scale_state, every, xp) if scaler.checks else scale_state
    if counts is not None:
        passed = scale_state._replace(skipped=scale_state.skipped + xp.asarray(1, scale_state.skipped))
        moved = LossScaleState(*(xp.where(counts, new, old) for new, old in zip(moved, passed, strict=True)))
        finite = counts if finite is None else finite & counts
    return Decision(finite, moved, step + xp.where(finite, one, zero), ~finite)

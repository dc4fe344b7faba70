"""Schedules made of others: several after each other, and one times a factor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from polyamp.array_namespace import PYTHON, ArrayNamespace
from polyamp.errors import RecipeError, describe_value
from polyamp.schedules import decays, warmups
from polyamp.schedules.schedule_base import ScheduleBase, check_steps

SimpleSchedule = (
    decays.Constant
    | decays.Cosine
    | decays.Polynomial
    | decays.Exponential
    | decays.Step
    | decays.Piecewise
    | decays.Restarts
    | warmups.LinearWarmup
    | warmups.WarmupCosine
    | warmups.Linear
    | warmups.WarmupStableDecay
    | warmups.InverseSqrt
    | warmups.OneCycle
)
"""A schedule that `join` takes."""


class SequentialSchedule(ScheduleBase):
    """`schedules[i]` from `boundaries[i-1]` updates on, each counted from its own beginning (`optax.join_schedules`,
    torch's `SequentialLR`).

    Args:
        schedules: two or more schedules other than `join`.
        boundaries: the counts at which the next one begins; one fewer than schedules.

    >>> joined = join([warmups.linear_warmup(1.0, 2), decays.exponential(1.0, 0.5)], boundaries=[2])
    >>> [joined(count) for count in range(5)]
    [0.0, 0.5, 1.0, 0.5, 0.25]
    """

    tag: ClassVar[str] = "join"

    schedules: Sequence[SimpleSchedule]
    boundaries: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("schedules", "boundaries"):
            given = getattr(self, name)
            if not isinstance(given, list | tuple):
                raise RecipeError(f"{name} must be a list. Received: {name}={describe_value(given)}.")
            self._set_field(name, tuple(given))
        for each in self.schedules:
            if not isinstance(each, SimpleSchedule):
                raise RecipeError(
                    f"schedules must be schedules of polyamp other than join. Received: {describe_value(each)}."
                )
        for boundary in self.boundaries:
            check_steps("boundaries", boundary, "schedules")
        if len(self.schedules) != len(self.boundaries) + 1 or list(self.boundaries) != sorted(set(self.boundaries)):
            raise RecipeError(
                "join needs strictly increasing boundaries and one more schedule than boundaries. Received: "
                f"{len(self.schedules)} schedules, boundaries={self.boundaries}."
            )

    def __call__(self, count: Any, xp: ArrayNamespace = PYTHON) -> Any:
        count = count * 1.0
        rate = self.schedules[0](count, xp)
        for boundary, schedule in zip(self.boundaries, self.schedules[1:], strict=True):
            since = xp.maximum(count - boundary, xp.asarray(0.0, count))
            rate = xp.where(count < boundary, rate, schedule(since, xp))
        return rate


class ScaledSchedule(ScheduleBase):
    """Another schedule times a factor, for `learning_rate_scale` of a parameter group. It has no file format.

    >>> ScaledSchedule(decays.constant(0.5), 0.25)(7)
    0.125
    """

    tag: ClassVar[str] = "times"

    schedule: Any
    factor: float

    def __call__(self, count: Any, xp: ArrayNamespace = PYTHON) -> Any:
        return self.schedule(count, xp) * self.factor


join = SequentialSchedule

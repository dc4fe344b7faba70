"""Learning-rate schedules: frozen, pure functions of the number of applied updates (S13).

`schedule(count)` is the learning rate of the update that follows `count` applied ones, so the first update uses
`schedule(0)`. The formulas run on Python numbers and, given a namespace, on any framework's scalars.

`docs/guides/schedules.md` has a picture of each, and who divides by what.
"""

from __future__ import annotations

from typing import Any, TypeGuard

from polyamp.schedules.combinations import ScaledSchedule, SequentialSchedule, SimpleSchedule, join
from polyamp.schedules.decays import (
    Constant,
    Cosine,
    Exponential,
    Piecewise,
    Polynomial,
    Restarts,
    Step,
    constant,
    cosine,
    exponential,
    piecewise,
    polynomial,
    restarts,
    step,
)
from polyamp.schedules.picture import plot
from polyamp.schedules.schedule_base import ScheduleBase
from polyamp.schedules.warmups import (
    InverseSqrt,
    Linear,
    LinearWarmup,
    OneCycle,
    WarmupCosine,
    WarmupStableDecay,
    inverse_sqrt,
    linear,
    linear_warmup,
    one_cycle,
    warmup_cosine,
    wsd,
)

Schedule = SimpleSchedule | SequentialSchedule
"""Any schedule; in a recipe file a table with `type = "warmup_cosine"` etc."""


def is_schedule(value: Any) -> TypeGuard[Schedule]:
    """Return True for a polyamp schedule, False for a number or another library's schedule."""
    return isinstance(value, ScheduleBase)


def like(name: str, **arguments: Any) -> Schedule:
    """Return the schedule of another library, by its name and its own arguments, with its rates.

    Args:
        name: "torch.OneCycleLR", "optax.warmup_cosine_decay_schedule", "keras.CosineDecay",
            "transformers.get_wsd_schedule", ...
        **arguments: the library's, by name. Those of torch and transformers, whose rate is the optimizer's, begin with
            `lr`, the optimizer's rate.

    Raises:
        RecipeError: the name is unknown, or the library's schedule does something that no schedule of polyamp's does.
        ArgumentError: an argument is unknown or missing.

    Example:
        >>> like("torch.PolynomialLR", lr=0.1, total_iters=10, power=2.0)
        schedules.polynomial(peak=0.1, steps=10, power=2.0)
    """
    from polyamp.schedules.library_schedules import schedule_of_library

    schedule: Schedule = schedule_of_library(name, arguments)
    return schedule


__all__ = [
    "Constant",
    "Cosine",
    "Exponential",
    "InverseSqrt",
    "Linear",
    "LinearWarmup",
    "OneCycle",
    "Piecewise",
    "Polynomial",
    "Restarts",
    "ScaledSchedule",
    "Schedule",
    "SequentialSchedule",
    "Step",
    "WarmupCosine",
    "WarmupStableDecay",
    "constant",
    "cosine",
    "exponential",
    "inverse_sqrt",
    "is_schedule",
    "join",
    "like",
    "linear",
    "linear_warmup",
    "one_cycle",
    "piecewise",
    "plot",
    "polynomial",
    "restarts",
    "step",
    "warmup_cosine",
    "wsd",
]


def __dir__() -> list[str]:
    return __all__

"""Base class of the schedules, and the checks and curves that several of them use."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from polyamp.array_namespace import PYTHON, ArrayNamespace
from polyamp.errors import RecipeError, did_you_mean, plain_number_hint
from polyamp.records import Record


class ScheduleBase(Record):
    """Base class of the schedules: a call over an array namespace."""

    word: ClassVar[str] = "schedule"

    def __repr__(self) -> str:
        return f"schedules.{super().__repr__()}"

    def __call__(self, count: Any, xp: ArrayNamespace = PYTHON) -> Any:
        """Return the learning rate after `count` applied updates: a float, or a scalar of `count`'s framework, in its
        dtype if that is floating and else in float32."""
        raise NotImplementedError  # implemented by every schedule


def clamp(share: Any, xp: ArrayNamespace) -> Any:
    """Return a number clamped to [0, 1].

    >>> clamp(1.5, PYTHON)
    1.0
    """
    return xp.minimum(xp.maximum(share, xp.asarray(0.0, share)), xp.asarray(1.0, share))


def progress_to(count: Any, steps: float, xp: ArrayNamespace, origin: int = 0) -> Any:
    """Return how far `count` is from `origin` to `steps`, clamped to [0, 1]; 1 if `steps` is 0.

    >>> progress_to(3, 4, PYTHON), progress_to(0, 0, PYTHON)
    (0.75, 1.0)
    """
    if not steps:
        return xp.asarray(1.0, count * 1.0)
    return clamp((count * 1.0 - origin) / (steps - origin) if origin else (count * 1.0) / steps, xp)


def half_cosine(peak: float, end: float, progress: Any, xp: ArrayNamespace) -> Any:
    """Return the point of a half cosine from `peak` (progress 0) to `end` (progress 1).

    >>> half_cosine(1.0, 0.0, 0.5, PYTHON)
    0.5
    """
    return end + (peak - end) * 0.5 * (1.0 + xp.cos(progress * math.pi))


def check_rate(name: str, value: Any) -> None:
    """Raise unless a rate, or a factor of one, is a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < math.inf:
        raise RecipeError(f"{name} must be a finite number of at least 0. Received: {name}={value!r}.")


def check_steps(name: str, value: Any, first: str = "the rate", *, least: int = 1) -> None:
    """Raise unless a number of updates is an integer of at least `least`.

    Args:
        name: the argument.
        value: its value.
        first: the argument before it, with which it may have been swapped.
        least: the smallest accepted number.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        fraction = isinstance(value, float) and not value.is_integer()
        swapped = f" Are {first} and {name} swapped? First comes {first}." if fraction else ""
        raise RecipeError(
            f"{name} must be an integer of at least {least}. Received: {name}={value!r}.{swapped}"
            f"{plain_number_hint(value)}"
        )


def check_positive(name: str, value: Any) -> None:
    """Raise unless a value is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < math.inf:
        raise RecipeError(f"{name} must be a finite number above 0. Received: {name}={value!r}.")


def check_origin(value: Any) -> None:
    """Raise unless a warmup's origin is 0 or a negative integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value > 0:
        raise RecipeError(
            "origin must be 0 (the first update has the rate `start`) or a negative integer (-1: it has the next rate "
            f"of the line). Received: origin={value!r}.{plain_number_hint(value)}"
        )


def check_total_steps(warmup_steps: float, total_steps: Any) -> None:
    """Raise unless `total_steps` is an integer above `warmup_steps`, which it includes."""
    check_steps("total_steps", total_steps, "peak")
    if total_steps <= warmup_steps:
        raise RecipeError(
            f"total_steps must exceed warmup_steps={warmup_steps}. Received: "
            f"total_steps={total_steps}. Are "
            "the two swapped? total_steps counts the warm-up too."
        )


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise unless a value is one of some words."""
    if value not in choices:
        hint = did_you_mean(value, choices) if isinstance(value, str) else ""
        raise RecipeError(f"{name} must be one of {', '.join(map(repr, choices))}. Received: {name}={value!r}.{hint}")

"""S15: state and update rule of the loss scale, over any framework's arrays.

    update_scale(state, finite):
        if finite:
            good = state.good_steps + 1
            if good >= growth_interval + late:
                scale, good, hysteresis = min(scale * growth_factor, max_scale), again, initial
            stuck = 0
        else:
            good, hysteresis, skipped = 0, hysteresis - 1, skipped + 1
            if hysteresis <= 0: scale = max(scale * backoff_factor, min_scale)
            stuck = stuck + 1 if scale == min_scale else 0

    late, again = {"none": (0, 0), "after_overflow": (1, 1), "always": (1, 0)}[growth_delay]

`>=`, because a run may continue with a smaller `growth_interval` than it began with.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Protocol

from polyamp.array_namespace import ArrayNamespace

NO_CEILING: Final = 2.0**127
"""Largest power of two in float32: the maximum scale of presets whose source has none (S17 still applies)."""
GROWTH_DELAYS: Final = {"none": (0, 0), "after_overflow": (1, 1), "always": (1, 0)}
"""Growth delay -> (extra finite steps before the first growth, value at which the count restarts after a growth)."""
_LARGEST_PRODUCT: Final = 1.5 * NO_CEILING
"""Above every maximum scale and finite in float32. Growth is clamped to it, so it never overflows or warns in NumPy."""


class LossScaleState(NamedTuple):
    """State of a loss scale: five scalar arrays of the framework, a pytree in every framework.

    Attributes:
        scale: float32 scalar, the factor that the next loss is multiplied by.
        good_steps: int32 scalar, finite steps since the last growth or overflow (with `growth_delay="after_overflow"`,
            one more after a growth).
        hysteresis: int32 scalar, overflows still tolerated before the scale backs off.
        skipped: int32 scalar, steps skipped since `init`.
        stuck: int32 scalar, consecutive skips at `min_scale`.
    """

    scale: Any
    good_steps: Any
    hysteresis: Any
    skipped: Any
    stuck: Any


class ScalerConstants(Protocol):
    """Fields of a `LossScaler` that the rule reads."""

    @property
    def growth_factor(self) -> float:
        """See `LossScaler`."""

    @property
    def backoff_factor(self) -> float:
        """See `LossScaler`."""

    @property
    def growth_interval(self) -> int:
        """See `LossScaler`."""

    @property
    def growth_delay(self) -> str:
        """See `LossScaler`."""

    @property
    def hysteresis(self) -> int:
        """See `LossScaler`."""

    @property
    def consecutive_hysteresis(self) -> bool:
        """See `LossScaler`."""

    @property
    def min_scale(self) -> float:
        """See `LossScaler`."""

    @property
    def max_scale(self) -> float:
        """See `LossScaler`."""


def update_scale(scaler: ScalerConstants, state: LossScaleState, finite: Any, xp: ArrayNamespace) -> LossScaleState:
    """Apply rule S15 over an array namespace. Branch-free, so it runs on the device and under every compiler."""
    scale, count = state.scale, state.good_steps
    if type(finite).__module__ in ("builtins", "numpy"):
        finite = xp.asarray(bool(finite), scale > 0)

    def number(value: float, like: Any) -> Any:
        return xp.asarray(value, like)

    zero, full = number(0, count), number(scaler.hysteresis, count)
    good = state.good_steps + number(1, count)
    late, again = GROWTH_DELAYS[scaler.growth_delay]
    grow = finite & (good >= number(scaler.growth_interval + late, count))
    left = xp.maximum(state.hysteresis - number(1, count), number(-1, count))
    refill = finite if scaler.consecutive_hysteresis else grow
    hysteresis = xp.where(refill, full, xp.where(finite, state.hysteresis, left))
    held = xp.minimum(scale, number(_LARGEST_PRODUCT / scaler.growth_factor, scale))
    grown = xp.minimum(held * number(scaler.growth_factor, scale), number(scaler.max_scale, scale))
    backed = xp.maximum(scale * number(scaler.backoff_factor, scale), number(scaler.min_scale, scale))
    overflowed = xp.where(left <= zero, backed, scale)
    new_scale = xp.where(finite, xp.where(grow, grown, scale), overflowed)
    at_floor = new_scale == number(scaler.min_scale, scale)
    return LossScaleState(
        scale=new_scale,
        good_steps=xp.where(finite, xp.where(grow, number(again, count), good), zero),
        hysteresis=hysteresis,
        skipped=xp.where(finite, state.skipped, state.skipped + number(1, count)),
        stuck=xp.where(finite, zero, xp.where(at_floor, state.stuck + number(1, count), zero)),
    )

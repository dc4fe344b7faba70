"""Schedules without a warmup: a constant rate, and curves and stairs from a first rate down."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from polyamp.array_namespace import PYTHON, ArrayNamespace
from polyamp.errors import RecipeError
from polyamp.schedules.schedule_base import (
    ScheduleBase,
    check_origin,
    check_positive,
    check_rate,
    check_steps,
    half_cosine,
    progress_to,
)

_LAST_COUNT: Final = 2**31
"""Counts of updates are 32 bits wide."""


class Constant(ScheduleBase):
    """Constant rate.

    >>> constant(0.1)(7)
    0.1
    """

    tag: ClassVar[str] = "constant"

    value: float

    def __post_init__(self) -> None:
        check_rate("value", self.value)

    def __call__(self, count: Any, xp: ArrayNamespace = PYTHON) -> Any:
        return xp.asarray(self.value, count * 1.0)


class Cosine(ScheduleBase):
    """Half a cosine from `peak` to `end` over `steps` updates, then `end` (arxiv.org/abs/1608.03983).

    Divided by `steps`, as in `optax.cosine_decay_schedule`, Keras's `CosineDecay` and torch's `CosineAnnealingLR`,
    which rises again after `T_max`. Code of one's own often divides by `steps - 1`, so that the last of `steps` updates
    has `end`: that is `cosine(peak, steps - 1, end)`.

    Args:
        peak: the rate at `count == origin`.
        steps: the count from which the rate is `end`.
        end: the last rate.
        origin: a negative integer: the cosine began that many updates before the first one, as behind a warmup that
            counts as a part of it (timm). None or 0: at the first one.

    >>> round(cosine(1.0, 10)(5), 6)
    0.5
    """

    tag: ClassVar[str] = "cosine"

    peak: float
    steps: int
    end: float = 0.0
    origin: int | None = None  # None for 0 too: files and checkpoints of before have no origin

    def __post_init__(self) -> None:
        check_rate("peak", self.peak)
        check_rate("end", self.end)
        check_steps("steps", self.steps, "peak")
        if self.origin is not None:
            check_origin(self.origin)
            self._set_field("origin", self.origin or None)

    def __call__(self, count: Any, xp: ArrayNamespace = PYTHON) -> Any:
        return half_cosine(self.peak, self.end, progress_to(count, self.steps, xp, self.origin or 0), xp)


class Polynomial(ScheduleBase):
    """`end + (peak - end) * (1 - count / steps) ** power`, then `end`.

    Divided by `steps`, as in torch's `PolynomialLR`, `optax.polynomial_schedule` and Keras's `PolynomialDecay`.

    Args:
        peak: the rate of the first update.
        steps: the count from which the rate is `end`.
        power: exponent, above 0; 1 is a straight line.
        end: the last rate.

    >>> polynomial(1.0, 10, power=2.0)(5)
    0.25
    """

    tag: ClassVar[str] = "polynomial"

    peak: float
    steps: int
    power: float = 1.0
    end: float = 0.0

    def __post_init__(self) -> None:
        check_rate("peak", self.peak)
        check_steps("steps", self.steps, "peak")
        check_positive("power", self.power)
        check_rate("end", self.end)

    def __call__(self, count: Any, xp: ArrayNamespace = PYTHON) -> Any:
        left = 1.0 - progress_to(count, self.steps, xp)
        return self.end + (self.peak - self.end) * xp.power(left, xp.asarray(self.power, left))


class Exponential(ScheduleBase):
    """`initial * factor ** (count / every)`, without an end.

    torch's `ExponentialLR` has `every=1`; Keras's `ExponentialDecay` and `optax.exponential_decay` have their number of
    steps there. In stairs (`staircase=True`) it is `step`.

    Args:
        initial: the rate of the first update.
        factor: factor of the rate over `every` updates, above 0.
        every: number of updates.

    >>> exponential(1.0, 0.25, every=10)(5)
    0.5
    """

    tag: ClassVar[str] = "exponential"

    initial: float
    factor: float
    every: int = 1

    def __post_init__(self) -> None:
        check_rate("initial", self.initial)
        check_positive("factor", self.factor)
        check_steps("every", self.every, "factor")

    def __call__(self, count: Any, xp: ArrayNamespace = PYTHON) -> Any:
        periods = (count * 1.0) / self.every
        return self.initial * xp.power(xp.asarray(self.factor, periods), periods)


class Step(ScheduleBase):
    """`initial`, multiplied by `factor` after every `every` updates (torch's `StepLR`).

    >>> step(1.0, every=10, factor=0.5)(25)
    0.25
    """

    tag: ClassVar[str] = "step"

    initial: float
    every: int
    factor: float = 0.1

    def __post_init__(self) -> None:
        check_rate("initial", self.initial)
        check_rate("factor", self.factor)
        check_steps("every", self.every, "initial")

    def __call__(self, count: Any, xp: ArrayNamespace = PYTHON) -> Any:
        drops = xp.floor((count * 1.0) / self.every)
        return self.initial * xp.power(xp.asarray(self.factor, drops * 1.0), drops)


class Piecewise(ScheduleBase):
    """`values[i]` from `boundaries[i-1]` updates on; one more value than boundaries.

    >>> piecewise((1.0, 0.5, 0.1), boundaries=(10, 20))(10)
    0.5
    """

    tag: ClassVar[str] = "piecewise"

    values: tuple[float, ...]
    boundaries: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("values", "boundaries"):
            given = getattr(self, name)
            if not isinstance(given, list | tuple):
                raise RecipeError(f"{name} must be a tuple of numbers. Received: {name}={given!r}.")
            self._set_field(name, tuple(given))
        for value in self.values:
            check_rate("values", value)
        for boundary in self.boundaries:
            check_steps("boundaries", boundary, "values")
        if len(self.values) != len(self.boundaries) + 1 or list(self.boundaries) != sorted(set(self.boundaries)):
            raise RecipeError(
                "piecewise needs strictly increasing boundaries and one more value than boundaries. Received: "
                f"values={self.values}, boundaries={self.boundaries}."
            )

    def __call__(self, count: Any, xp: ArrayNamespace = PYTHON) -> Any:
        count = count * 1.0
        rate = xp.asarray(self.values[0], count)
        for boundary, value in zip(self.boundaries, self.values[1:], strict=True):
            rate = xp.where(count < boundary, rate, xp.asarray(value, count))
        return rate


class Restarts(ScheduleBase):
    """Half a cosine from `peak` to `end` over `steps` updates, again and again, each cycle `factor` times as long as
    the one before (arxiv.org/abs/1608.03983).

    torch's `CosineAnnealingWarmRestarts` with `T_0=steps`, `T_mult=factor`, and Keras's `CosineDecayRestarts` with
    `m_mul=peak_factor`. The update at which a cycle ends has the next one's first rate.

    Args:
        peak: the first rate of the first cycle.
        steps: updates of the first cycle.
        factor: growth of the cycles' length, an integer of at least 1.
        end: the rate that each cycle approaches.
        peak_factor: factor of the height `peak - end` from cycle to cycle.

    >>> [round(restarts(1.0, 2, factor=2)(count), 3) for count in range(7)]
    [1.0, 0.5, 1.0, 0.854, 0.5, 0.146, 1.0]
    """

    tag: ClassVar[str] = "restarts"

    peak: float
    steps: int
    factor: int = 1
    end: float = 0.0
    peak_factor: float = 1.0

    def __post_init__(self) -> None:
        check_rate("peak", self.peak)
        check_steps("steps", self.steps, "peak")
        check_steps("factor", self.factor, "steps")
        check_rate("end", self.end)
        check_rate("peak_factor", self.peak_factor)

    def __call__(self, count: Any, xp: ArrayNamespace = PYTHON) -> Any:
        count = count * 1.0
        if self.factor == 1:
            cycle = xp.floor(count / self.steps) * 1.0
            share = count / self.steps - cycle
            height = xp.power(xp.asarray(self.peak_factor, cycle), cycle)
        else:  # the ends of the cycles are exact numbers, where a logarithm would be off by one update
            share, height = count / self.steps, xp.asarray(1.0, count)
            begin, length, scale = 0.0, float(self.steps), 1.0
            while begin + length < _LAST_COUNT:
                begin, length, scale = begin + length, length * self.factor, scale * self.peak_factor
                share = xp.where(count < begin, share, (count - begin) / length)
                height = xp.where(count < begin, height, xp.asarray(scale, count))
        return self.end + height * half_cosine(self.peak - self.end, 0.0, share, xp)


constant = Constant
cosine = Cosine
polynomial = Polynomial
exponential = Exponential
step = Step
piecewise = Piecewise
restarts = Restarts

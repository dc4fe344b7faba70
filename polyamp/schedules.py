"""Learning-rate schedules: frozen, pure functions of the number of applied updates (S13).

`schedule(count)` is the learning rate of the update that follows `count` applied ones, so the first update uses
`schedule(0)`. The formulas run on Python numbers and, given a namespace, on any framework's scalars.

A warmup is a straight line from `start` at `count == origin` to `peak` at `count == warmup_steps`. Whatever its origin,
it has `warmup_steps` updates below `peak`:

- `origin=0`, as in optax and transformers: the first update has `start`. With `start=0.0` it changes no parameter.
- `origin=-1`, as in nanoGPT: `start` lies one update before the first, which has
  `start + (peak - start) / (warmup_steps + 1)`.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, TypeGuard

from polyamp.array_namespace import PYTHON, ArrayNamespace
from polyamp.errors import RecipeError, plain_number_hint
from polyamp.records import Record


class _Schedule(Record):
    """Base class of the schedules: a call over an array namespace."""

    word: ClassVar[str] = "schedule"

    def __repr__(self) -> str:
        return f"schedules.{super().__repr__()}"

    def __call__(self, count: Any, xp: ArrayNamespace = PYTHON) -> Any:
        """Return the learning rate after `count` applied updates: a float, or a scalar of `count`'s framework, in its
        dtype if that is floating and else in float32."""
        raise NotImplementedError  # implemented by every schedule


class Constant(_Schedule):
    """Constant rate.

    >>> constant(0.1)(7)
    0.1
    """

    tag: ClassVar[str] = "constant"

    value: float

    def __post_init__(self) -> None:
        _check_rate("value", self.value)

    def __call__(self, count: Any, xp: ArrayNamespace = PYTHON) -> Any:
        return xp.asarray(self.value, count * 1.0)


class LinearWarmup(_Schedule):
    """Straight line from `start` at `count == origin` to `peak` at `count == steps`, then `peak`.

    Args:
        peak: the rate from `count == steps` on.
        steps: updates below `peak`, at least 1.
        start: the rate at `count == origin`.
        origin: 0, or a negative integer: 0 gives the first update `start`; -1 the first rate above it.

    >>> [linear_warmup(1.0, 4)(count) for count in range(5)]
    [0.0, 0.25, 0.5, 0.75, 1.0]
    >>> [linear_warmup(1.0, 4, origin=-1)(count) for count in range(5)]
    [0.2, 0.4, 0.6, 0.8, 1.0]
    """

    tag: ClassVar[str] = "linear_warmup"

    peak: float
    steps: int
    start: float = 0.0
    origin: int = 0

    def __post_init__(self) -> None:
        _check_rate("peak", self.peak)
        _check_rate("start", self.start)
        _check_steps("steps", self.steps, "peak")
        _check_origin(self.origin)

    def __call__(self, count: Any, xp: ArrayNamespace = PYTHON) -> Any:
        return self.start + (self.peak - self.start) * _progress(count, self.steps, xp, self.origin)


class Cosine(_Schedule):
    """Half a cosine from `peak` to `end` over `steps` updates, then `end` (arxiv.org/abs/1608.03983).

    >>> round(cosine(1.0, 10)(5), 6)
    0.5
    """

    tag: ClassVar[str] = "cosine"

    peak: float
    steps: int
    end: float = 0.0

    def __post_init__(self) -> None:
        _check_rate("peak", self.peak)
        _check_rate("end", self.end)
        _check_steps("steps", self.steps, "peak")

    def __call__(self, count: Any, xp: ArrayNamespace = PYTHON) -> Any:
        return _half_cosine(self.peak, self.end, _progress(count, self.steps, xp), xp)


class WarmupCosine(_Schedule):
    """`linear_warmup` to `peak` at `count == warmup_steps`, then `cosine` to `end` at `count == total_steps`.

    With `origin=-1` and `start=0.0` it is nanoGPT's `get_lr` (github.com/karpathy/nanoGPT, train.py).

    Args:
        peak: the rate at `count == warmup_steps`.
        warmup_steps: updates of the warmup, all below `peak`; at least 1.
        total_steps: the count from which the rate is `end`. It counts the warmup too.
        start: the warmup's rate at `count == origin`.
        end: the last rate.
        origin: 0, or a negative integer: 0 gives the first update `start`; -1 the first rate above it.

    >>> warmup_cosine(1.0, warmup_steps=2, total_steps=4)(1)
    0.5
    """

    tag: ClassVar[str] = "warmup_cosine"

    peak: float
    warmup_steps: int
    total_steps: int
    start: float = 0.0
    end: float = 0.0
    origin: int = 0

    def __post_init__(self) -> None:
        for name in ("peak", "start", "end"):
            _check_rate(name, getattr(self, name))
        _check_steps("warmup_steps", self.warmup_steps, "peak")
        _check_steps("total_steps", self.total_steps, "peak")
        _check_origin(self.origin)
        if self.total_steps <= self.warmup_steps:
            raise RecipeError(
                f"total_steps must exceed warmup_steps={self.warmup_steps}. Received: "
                f"total_steps={self.total_steps}. Are "
                "the two swapped? total_steps counts the warm-up too."
            )

    def __call__(self, count: Any, xp: ArrayNamespace = PYTHON) -> Any:
        count = count * 1.0
        rising = self.start + (self.peak - self.start) * _progress(count, self.warmup_steps, xp, self.origin)
        after = _progress(count - self.warmup_steps, self.total_steps - self.warmup_steps, xp)
        return xp.where(count < self.warmup_steps, rising, _half_cosine(self.peak, self.end, after, xp))


class Step(_Schedule):
    """`initial`, multiplied by `factor` after every `every` updates (torch's `StepLR`).

    >>> step(1.0, every=10, factor=0.5)(25)
    0.25
    """

    tag: ClassVar[str] = "step"

    initial: float
    every: int
    factor: float = 0.1

    def __post_init__(self) -> None:
        _check_rate("initial", self.initial)
        _check_rate("factor", self.factor)
        _check_steps("every", self.every, "initial")

    def __call__(self, count: Any, xp: ArrayNamespace = PYTHON) -> Any:
        drops = xp.floor((count * 1.0) / self.every)
        return self.initial * xp.power(xp.asarray(self.factor, drops * 1.0), drops)


class Piecewise(_Schedule):
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
            _check_rate("values", value)
        for boundary in self.boundaries:
            _check_steps("boundaries", boundary, "values")
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


class ScaledSchedule(_Schedule):
    """Another schedule times a factor, for `learning_rate_scale` of a parameter group. It has no file format.

    >>> ScaledSchedule(constant(0.5), 0.25)(7)
    0.125
    """

    tag: ClassVar[str] = "times"

    schedule: Any
    factor: float

    def __call__(self, count: Any, xp: ArrayNamespace = PYTHON) -> Any:
        return self.schedule(count, xp) * self.factor


Schedule = Constant | LinearWarmup | Cosine | WarmupCosine | Step | Piecewise
"""Any schedule; in a recipe file a table with `type = "warmup_cosine"` etc."""

constant = Constant
linear_warmup = LinearWarmup
cosine = Cosine
warmup_cosine = WarmupCosine
step = Step
piecewise = Piecewise


def is_schedule(value: Any) -> TypeGuard[Schedule]:
    """Return True for a polyamp schedule, False for a number or another library's schedule."""
    return isinstance(value, _Schedule)


def _progress(count: Any, steps: int, xp: ArrayNamespace, origin: int = 0) -> Any:
    """Return how far `count` is from `origin` to `steps`, clamped to [0, 1]."""
    share = (count * 1.0 - origin) / (steps - origin) if origin else (count * 1.0) / steps
    return xp.minimum(xp.maximum(share, xp.asarray(0.0, share)), xp.asarray(1.0, share))


def _half_cosine(peak: float, end: float, progress: Any, xp: ArrayNamespace) -> Any:
    return end + (peak - end) * 0.5 * (1.0 + xp.cos(progress * math.pi))


def _check_rate(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < math.inf:
        raise RecipeError(f"{name} must be a finite number of at least 0. Received: {name}={value!r}.")


def _check_steps(name: str, value: Any, first: str = "the rate") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        fraction = isinstance(value, float) and not value.is_integer()
        swapped = f" Are {first} and {name} swapped? First comes {first}." if fraction else ""
        raise RecipeError(
            f"{name} must be an integer of at least 1. Received: {name}={value!r}.{swapped}{plain_number_hint(value)}"
        )


def _check_origin(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value > 0:
        raise RecipeError(
            "origin must be 0 (the first update has the rate `start`) or a negative integer (-1: it has the next rate "
            f"of the line). Received: origin={value!r}.{plain_number_hint(value)}"
        )

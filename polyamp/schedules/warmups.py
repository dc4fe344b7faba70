"""Schedules with a warmup: a straight line up, then a line, a cosine, a plateau with a decay, or a root down.

A warmup is a straight line from `start` at `count == origin` to `peak` at `count == warmup_steps`. Whatever its origin,
it has `warmup_steps` updates below `peak`:

- `origin=0`, as in optax and transformers: the first update has `start`. With `start=0.0` it changes no parameter.
- `origin=-1`, as in nanoGPT: `start` lies one update before the first, which has
  `start + (peak - start) / (warmup_steps + 1)`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal, get_args

from polyamp.array_namespace import PYTHON, ArrayNamespace
from polyamp.errors import RecipeError
from polyamp.schedules.schedule_base import (
    ScheduleBase,
    check_choice,
    check_origin,
    check_positive,
    check_rate,
    check_steps,
    check_total_steps,
    half_cosine,
    progress_to,
)

DecayShape = Literal["1-sqrt", "linear", "cosine"]
DECAY_SHAPES: Final[tuple[str, ...]] = get_args(DecayShape)


class LinearWarmup(ScheduleBase):
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
        check_rate("peak", self.peak)
        check_rate("start", self.start)
        check_steps("steps", self.steps, "peak")
        check_origin(self.origin)

    def __call__(self, count: Any, xp: ArrayNamespace = PYTHON) -> Any:
        return self.start + (self.peak - self.start) * progress_to(count, self.steps, xp, self.origin)


class WarmupCosine(ScheduleBase):
    """`linear_warmup` to `peak` at `count == warmup_steps`, then `cosine` to `end` at `count == total_steps`.

    With `origin=-1` and `start=0.0` it is nanoGPT's `get_lr` (github.com/karpathy/nanoGPT, train.py).

    Args:
        peak: the rate at `count == warmup_steps`.
        warmup_steps: updates of the warmup, all below `peak`; 0 for none.
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
            check_rate(name, getattr(self, name))
        check_steps("warmup_steps", self.warmup_steps, "peak", least=0)
        check_origin(self.origin)
        check_total_steps(self.warmup_steps, self.total_steps)

    def __call__(self, count: Any, xp: ArrayNamespace = PYTHON) -> Any:
        count = count * 1.0
        after = progress_to(count - self.warmup_steps, self.total_steps - self.warmup_steps, xp)
        return xp.where(
            count < self.warmup_steps, _rising(self, count, xp), half_cosine(self.peak, self.end, after, xp)
        )


class Linear(ScheduleBase):
    """Straight line from `start` at `count == origin` to `peak` at `count == warmup_steps`, then one to `end` at
    `count == total_steps`.

    The decay is divided by `total_steps - warmup_steps`, as in transformers' `get_linear_schedule_with_warmup`. With
    `warmup_steps=0` it is torch's `LinearLR` and `optax.linear_schedule`, divided by their number of steps.

    Args:
        peak: the rate at `count == warmup_steps`.
        warmup_steps: updates of the warmup, all below `peak`; 0 for none.
        total_steps: the count from which the rate is `end`. It counts the warmup too.
        end: the last rate.
        start: the warmup's rate at `count == origin`.
        origin: 0, or a negative integer: 0 gives the first update `start`; -1 the first rate above it.

    >>> [linear(1.0, warmup_steps=2, total_steps=6)(count) for count in range(7)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """

    tag: ClassVar[str] = "linear"

    peak: float
    warmup_steps: int
    total_steps: int
    end: float = 0.0
    start: float = 0.0
    origin: int = 0

    def __post_init__(self) -> None:
        for name in ("peak", "end", "start"):
            check_rate(name, getattr(self, name))
        check_steps("warmup_steps", self.warmup_steps, "peak", least=0)
        check_origin(self.origin)
        check_total_steps(self.warmup_steps, self.total_steps)

    def __call__(self, count: Any, xp: ArrayNamespace = PYTHON) -> Any:
        count = count * 1.0
        after = progress_to(count - self.warmup_steps, self.total_steps - self.warmup_steps, xp)
        falling = self.peak + (self.end - self.peak) * after
        return xp.where(count < self.warmup_steps, _rising(self, count, xp), falling)


class WarmupStableDecay(ScheduleBase):
    """Warmup to `peak`, a plateau, and a decay over the last `decay_steps` updates to `end` at `count == total_steps`
    (arxiv.org/abs/2404.06395; its decay by 1 - sqrt: arxiv.org/abs/2405.18392).

    With p the share of the decay, (count - (total_steps - decay_steps)) / decay_steps, the rate is
    `end + (peak - end) * f(p)`: f(p) is 1 - sqrt(p), 1 - p, or (1 + cos(pi p)) / 2. The divisor is `decay_steps`, as in
    transformers' `get_wsd_schedule`; that warms up from its smallest rate, here `start`.

    Args:
        peak: the rate of the plateau.
        warmup_steps: updates of the warmup, all below `peak`; 0 for none.
        total_steps: the count from which the rate is `end`. It counts warmup, plateau and decay.
        decay_steps: updates of the decay.
        end: the last rate.
        shape: "1-sqrt", "linear" or "cosine".
        start: the warmup's rate at `count == origin`.
        origin: 0, or a negative integer: 0 gives the first update `start`; -1 the first rate above it.

    >>> [wsd(1.0, warmup_steps=2, total_steps=8, decay_steps=4)(count) for count in range(9)]
    [0.0, 0.5, 1.0, 1.0, 1.0, 0.5, 0.2928932188134524, 0.1339745962155614, 0.0]
    """

    tag: ClassVar[str] = "wsd"

    peak: float
    warmup_steps: int
    total_steps: int
    decay_steps: int
    end: float = 0.0
    shape: DecayShape = "1-sqrt"
    start: float = 0.0
    origin: int = 0

    def __post_init__(self) -> None:
        for name in ("peak", "end", "start"):
            check_rate(name, getattr(self, name))
        check_steps("warmup_steps", self.warmup_steps, "peak", least=0)
        check_origin(self.origin)
        check_total_steps(self.warmup_steps, self.total_steps)
        check_steps("decay_steps", self.decay_steps, "total_steps")
        check_choice("shape", self.shape, DECAY_SHAPES)
        if self.warmup_steps + self.decay_steps > self.total_steps:
            raise RecipeError(
                f"total_steps must hold warmup and decay, {self.warmup_steps} + {self.decay_steps} updates. Received: "
                f"total_steps={self.total_steps}."
            )

    def __call__(self, count: Any, xp: ArrayNamespace = PYTHON) -> Any:
        count = count * 1.0
        share = progress_to(count - (self.total_steps - self.decay_steps), self.decay_steps, xp)
        if self.shape == "cosine":
            decaying = half_cosine(self.peak, self.end, share, xp)
        else:
            left = 1.0 - (share if self.shape == "linear" else xp.sqrt(share))
            decaying = self.end + (self.peak - self.end) * left
        return xp.where(count < self.warmup_steps, _rising(self, count, xp), decaying)


class InverseSqrt(ScheduleBase):
    """Warmup to `peak`, then `peak * sqrt(timescale / (count - warmup_steps + timescale))` without an end (the schedule
    of arxiv.org/abs/1706.03762, and of T5 and transformers' `get_inverse_sqrt_schedule`).

    Args:
        peak: the rate at `count == warmup_steps`.
        warmup_steps: updates of the warmup, all below `peak`; 0 for none.
        timescale: the updates after the warmup in which the rate falls to `peak / sqrt(2)`; None: `warmup_steps`.
        start: the warmup's rate at `count == origin`.
        origin: 0, or a negative integer: 0 gives the first update `start`; -1 the first rate above it.

    >>> [inverse_sqrt(1.0, warmup_steps=4)(count) for count in (0, 2, 4, 16, 64)]
    [0.0, 0.5, 1.0, 0.5, 0.25]
    """

    tag: ClassVar[str] = "inverse_sqrt"

    peak: float
    warmup_steps: int
    timescale: float | None = None
    start: float = 0.0
    origin: int = 0

    def __post_init__(self) -> None:
        check_rate("peak", self.peak)
        check_rate("start", self.start)
        check_steps("warmup_steps", self.warmup_steps, "peak", least=0)
        check_origin(self.origin)
        check_positive("timescale", self.warmup_steps if self.timescale is None else self.timescale)

    def __call__(self, count: Any, xp: ArrayNamespace = PYTHON) -> Any:
        count = count * 1.0
        timescale = float(self.warmup_steps if self.timescale is None else self.timescale)
        after = xp.maximum(count - self.warmup_steps, xp.asarray(0.0, count))
        falling = self.peak * xp.sqrt(timescale / (after + timescale))
        return xp.where(count < self.warmup_steps, _rising(self, count, xp), falling)


class OneCycle(ScheduleBase):
    """Up from `start` to `peak` at `count == warmup_steps`, down to `end` at `count == total_steps`, then `end`
    (arxiv.org/abs/1708.07120).

    torch's `OneCycleLR` with `total_steps` T ends one update earlier: its warmup is `pct_start * T - 1` and its end
    `T - 1`; optax's `cosine_onecycle_schedule` has `int(pct_start * T)` and T. `schedules.like` gives either.

    Args:
        peak: the rate at `count == warmup_steps`.
        warmup_steps: length of the way up, a number above 0; it may lie between two updates.
        total_steps: the count from which the rate is `end`. It counts the warmup too.
        start: the rate at `count == 0`; None: `peak / 25`, as in torch and optax.
        end: the last rate; None: `start / 10_000`, as in both.
        shape: "cosine", half a cosine up and half a one down; or "linear".

    >>> [round(one_cycle(1.0, warmup_steps=2, total_steps=6, start=0.1, end=0.0)(count), 3) for count in range(7)]
    [0.1, 0.55, 1.0, 0.854, 0.5, 0.146, 0.0]
    """

    tag: ClassVar[str] = "one_cycle"

    peak: float
    warmup_steps: float
    total_steps: int
    start: float | None = None
    end: float | None = None
    shape: Literal["cosine", "linear"] = "cosine"

    def __post_init__(self) -> None:
        check_rate("peak", self.peak)
        for name in ("start", "end"):
            if getattr(self, name) is not None:
                check_rate(name, getattr(self, name))
        check_positive("warmup_steps", self.warmup_steps)
        check_total_steps(self.warmup_steps, self.total_steps)
        check_choice("shape", self.shape, ("cosine", "linear"))

    def __call__(self, count: Any, xp: ArrayNamespace = PYTHON) -> Any:
        count = count * 1.0
        start = self.peak / 25.0 if self.start is None else self.start
        end = start / 1e4 if self.end is None else self.end
        up = progress_to(count, self.warmup_steps, xp)
        down = progress_to(count - self.warmup_steps, self.total_steps - self.warmup_steps, xp)
        if self.shape == "cosine":
            rising, falling = half_cosine(start, self.peak, up, xp), half_cosine(self.peak, end, down, xp)
        else:
            rising, falling = start + (self.peak - start) * up, self.peak + (end - self.peak) * down
        return xp.where(count < self.warmup_steps, rising, falling)


linear_warmup = LinearWarmup
warmup_cosine = WarmupCosine
linear = Linear
wsd = WarmupStableDecay
inverse_sqrt = InverseSqrt
one_cycle = OneCycle


def _rising(schedule: Any, count: Any, xp: ArrayNamespace) -> Any:
    """Return a warmup's line: from `start` at `origin` to `peak` at `warmup_steps`."""
    progress = progress_to(count, schedule.warmup_steps, xp, schedule.origin)
    return schedule.start + (schedule.peak - schedule.start) * progress

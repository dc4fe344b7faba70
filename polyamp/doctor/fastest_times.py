"""Times of several programs, measured so that other processes on the machine disturb them little.

The programs take turns, so a disturbance meets all of them; samples are short, so that some are undisturbed; and the
fastest sample counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Final, NamedTuple, TypeVar

Program = Callable[[int], None]
"""`program(n)` runs n times and returns at the end of the last."""
Key = TypeVar("Key", bound=Hashable)
_LONG: Final = 0.1
"""Seconds of one run from which on a program is run twice only."""


class TimingLimits(NamedTuple):
    """How long to measure.

    Attributes:
        sample: seconds that one sample takes at least, for programs that are shorter than that.
        budget: seconds for all programs together, unless `rounds` takes longer.
        rounds: samples of each program at least.
        most_rounds: samples of each program at most.
    """

    sample: float
    budget: float
    rounds: int = 5
    most_rounds: int = 60


def fastest_times(
    programs: Mapping[Key, Program], limits: TimingLimits, clock: Callable[[], float] = time.perf_counter
) -> dict[Key, float]:
    """Return the seconds of one run of each program, which has run before and so is compiled.

    Args:
        programs: name -> program.
        limits: how long to measure, in seconds of the clock.
        clock: for programs on one core of a CPU `time.process_time`, which does not count while others have the core.

    Example:
        >>> times = fastest_times({"add": lambda n: None}, TimingLimits(0.0, 0.01))
        >>> 0.0 <= times["add"] < 0.01
        True
    """
    best: dict[Key, float] = {}
    runs: dict[Key, int] = {}
    began = clock()

    def sample(key: Key, count: int) -> float:
        start = clock()
        programs[key](count)
        seconds = (clock() - start) / count
        best[key] = min(best.get(key, math.inf), seconds)
        return seconds

    for key in programs:
        seconds = sample(key, 1)
        if seconds > _LONG:  # or disturbed
            seconds = min(seconds, sample(key, 1))
        runs[key] = 0 if seconds > _LONG else max(1, min(50, math.ceil(limits.sample / max(seconds, 1e-7))))
    for finished in range(limits.most_rounds):
        if finished >= limits.rounds and clock() - began > limits.budget:
            break
        for key, count in runs.items():
            if count:
                sample(key, count)
    return best

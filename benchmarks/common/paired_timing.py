"""Measurements of two training steps against each other, in one process: what the scripts of every framework share.

Machines are noisy, so times are compared within a round, in which both sides run once, in changing order; what counts
is the median of the rounds' ratios, with their quartiles.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import results
from benchmarks.common.results import Entry, Results, Side

Step = Callable[[], Any]
"""Runs one training step and waits for its end; it may return the step's loss."""

_STARTED = time.perf_counter()


class Row(NamedTuple):
    """Two steps to compare.

    Attributes:
        name: what is measured.
        target: the largest ratio that is wanted, or None where the figure is only reported.
        base: name and step of what polyamp is measured against.
        own: the same of what is measured.
        after_backward: time only what follows the moment that the clock given to `measure` reads.
        share: the rounds that this row takes, of all; slow steps take fewer.
        section: of `results.SECTIONS`.
        note: of `results.Entry`.
    """

    name: str
    target: float | None
    base: tuple[str, Step]
    own: tuple[str, Step]
    after_backward: bool = False
    share: float = 1.0
    section: str = "targets"
    note: str = ""


class Settings(NamedTuple):
    """How long to measure.

    Attributes:
        rounds: rounds of a row.
        steps: steps of each side in a round.
        warmup: rounds that are not counted.
        threads: threads to compute with, where the framework can be told.
        seconds: after so many, a row ends, if it has five rounds or all that were asked for.
    """

    rounds: int = 61
    steps: int = 3
    warmup: int = 3
    threads: int = 1
    seconds: int = 6


QUICK = Settings(rounds=2, steps=1, warmup=1, seconds=1)
LEAST_ROUNDS = 5


class Found(NamedTuple):
    """Seconds a step, one entry per round."""

    base: list[float]
    own: list[float]


Clock = Callable[[], AbstractContextManager[list[float]]]
"""Makes a context whose one number is the time at which the last step's backward pass ended."""


def measure(row: Row, settings: Settings, clock: Clock = lambda: nullcontext([0.0])) -> Found:
    """The times of one row."""
    found = Found([], [])
    gc.collect()
    gc.disable()  # a collection would fall on whichever side made the last object
    least = min(LEAST_ROUNDS, settings.rounds)
    rounds = max(least, round(settings.rounds * row.share))
    started = time.perf_counter()
    with clock() as finished:
        for number in range(settings.warmup + rounds):
            if len(found.own) >= least and time.perf_counter() - started > settings.seconds:
                break
            sides = [(row.base[1], found.base), (row.own[1], found.own)]
            for step, times in sides if np.random.default_rng(number).random() < 0.5 else reversed(sides):
                seconds = 0.0
                for _ in range(settings.steps):
                    begin = time.perf_counter()
                    step()
                    end = time.perf_counter()
                    seconds += end - (finished[0] if row.after_backward else begin)
                if number >= settings.warmup:
                    times.append(seconds / settings.steps)
    gc.enable()
    return found


def entry(row: Row, found: Found, **facts: Any) -> Entry:
    """A row and its times as they are written down; `facts` are further fields of the entry."""
    return Entry(
        section=row.section,
        name=row.name,
        unit="s",
        own=Side(row.own[0], found.own),
        base=Side(row.base[0], found.base),
        target=row.target,
        note=row.note,
        **facts,
    )


def distance(base: Sequence[float], own: Sequence[float]) -> float:
    """Largest relative distance between two curves of losses; NaN where either is not finite."""
    one, other = np.asarray(own, float), np.asarray(base, float)
    return float(np.max(np.abs(one - other) / np.maximum(np.abs(other), np.finfo(np.float32).tiny)))


def keep_freed_memory() -> None:
    """Make the C library keep what is freed: or whichever side frees its gradients later leaves the other without page
    faults, which are a quarter of a transformer block's step on the CPU. Does nothing where the library is not glibc.
    """
    no_mappings, trim_above = -4, -1  # M_MMAP_MAX and M_TRIM_THRESHOLD of malloc.h
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(no_mappings, 0)
        library.mallopt(trim_above, 2**31 - 1)


def parse(parser: argparse.ArgumentParser, **defaults: int) -> tuple[argparse.Namespace, Settings]:
    """The arguments, those of the measurement added, and the settings that they ask for.

    Args:
        parser: of the script.
        **defaults: settings of a full run that are other in this script.
    """
    full = Settings(**defaults)
    parser.add_argument("--quick", action="store_true", help="a short run: everything works, the times mean little")
    for name in Settings._fields:
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"default: {getattr(full, name)}")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything measured, raw")
    arguments = parser.parse_args()
    given = {name: value for name in Settings._fields if (value := getattr(arguments, name)) is not None}
    return arguments, (QUICK if arguments.quick else full)._replace(**given)


def finish(
    entries: Sequence[Entry], environment: dict[str, Any], settings: Settings, script: str, path: Path | None
) -> None:
    """Print the tables, and write them where `--json` says."""
    print(results.text(entries))
    if path is not None:
        seconds = time.perf_counter() - _STARTED
        results.write(
            path,
            Results(
                script=_name(Path(script).resolve()),
                environment=environment,
                settings=settings._asdict(),
                entries=list(entries),
                seconds=seconds,
            ),
        )


def _name(script: Path) -> str:
    """A script's path below `benchmarks`, of this checkout or another: "torch/step.py", "import_time.py"."""
    folders = script.parts[:-1]
    return script.name if folders[-1] == "benchmarks" else f"{folders[-1]}/{script.name}"

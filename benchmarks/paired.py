"""Measurements of two training steps against each other, in one process: what `torch_step` and `tensorflow_step` share.

Machines are noisy, so times are compared within a round, in which both sides run once, in changing order; what counts
is the median of the rounds' ratios, with their quartiles, and beside it the ratio of the fastest rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

Step = Callable[[], Any]
"""Runs one training step."""


class Row(NamedTuple):
    """Two steps to compare.

    Attributes:
        name: what is measured.
        target: the largest ratio that is wanted, or None where the figure is only reported.
        base: name and step of what polyamp is measured against.
        own: the same of what is measured.
        after_backward: time only what follows the moment that the clock given to `measure` reads.
        share: the rounds that this row takes, of all; slow steps take fewer.
    """

    name: str
    target: float | None
    base: tuple[str, Step]
    own: tuple[str, Step]
    after_backward: bool = False
    share: float = 1.0


class Settings(NamedTuple):
    """How long to measure.

    Attributes:
        rounds: rounds of a row.
        steps: steps of each side in a round.
        warmup: rounds that are not counted.
        threads: threads to compute with, where the framework can be told.
    """

    rounds: int = 61
    steps: int = 3
    warmup: int = 3
    threads: int = 1


QUICK = Settings(rounds=5, steps=1, warmup=1)


class Found(NamedTuple):
    """Seconds a step, one entry per round."""

    base: list[float]
    own: list[float]


class Ratio(NamedTuple):
    """Of two lists of times, round by round: the median and the quartiles; and the fastest over the fastest."""

    median: float
    low: float
    high: float
    fastest: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}..{self.high:.3f}, fastest {self.fastest:.3f})"


def ratio(found: Found) -> Ratio:
    """`own` over `base`."""
    each = [own / base for own, base in zip(found.own, found.base, strict=True)]
    low, _, high = statistics.quantiles(each, n=4) if len(each) > 1 else (each[0],) * 3
    return Ratio(statistics.median(each), low, high, min(found.own) / min(found.base))


Clock = Callable[[], AbstractContextManager[list[float]]]
"""Makes a context whose one number is the time at which the last step's backward pass ended."""


def measure(row: Row, settings: Settings, clock: Clock = lambda: nullcontext([0.0])) -> Found:
    """The times of one row."""
    found = Found([], [])
    gc.collect()
    gc.disable()  # a collection would fall on whichever side made the last object
    rounds = max(2, round(settings.rounds * row.share))
    with clock() as finished:
        for number in range(settings.warmup + rounds):
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


def keep_freed_memory() -> None:
    """Make the C library keep what is freed: or whichever side frees its gradients later leaves the other without page
    faults, which are a quarter of a transformer block's step on the CPU. Does nothing where the library is not glibc.
    """
    no_mappings, trim_above = -4, -1  # M_MMAP_MAX and M_TRIM_THRESHOLD of malloc.h
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(no_mappings, 0)
        library.mallopt(trim_above, 2**31 - 1)


def report(rows: Sequence[tuple[Row, Found]]) -> str:
    """A table: both sides' medians, the ratio with its spread, and the target."""
    lines = [["", "against", "ms", "measured", "ms", "ratio (quartiles)", "target"]]
    for row, found in rows:
        base, own = (f"{statistics.median(times) * 1e3:.3f}" for times in found)
        target = "" if row.target is None else f"<= {row.target:.2f}"
        lines.append([row.name, row.base[0], base, row.own[0], own, str(ratio(found)), target])
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def parse(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Settings]:
    """The arguments, those of the measurement added, and the settings that they ask for."""
    parser.add_argument("--quick", action="store_true", help="a short run: everything works, the times mean little")
    for name in Settings._fields:
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"default: {getattr(Settings(), name)}")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything measured, raw")
    arguments = parser.parse_args()
    given = {name: value for name in Settings._fields if (value := getattr(arguments, name)) is not None}
    return arguments, (QUICK if arguments.quick else Settings())._replace(**given)


def machine() -> dict[str, Any]:
    """Python and the processor."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return {
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "amx": "amx_bf16" in flags,
        "avx512_bf16": "avx512_bf16" in flags,
    }


def heading(environment: Mapping[str, Any], settings: Settings) -> str:
    """What was measured on what, in two lines."""
    return "\n".join(
        ", ".join(f"{name} {value}" for name, value in facts.items()) for facts in (environment, settings._asdict())
    )


def write_json(
    path: Path, rows: Sequence[tuple[Row, Found]], environment: Mapping[str, Any], settings: Settings
) -> None:
    """Everything measured, raw: no ratio or median is taken yet."""
    content = {
        "environment": environment,
        "settings": settings._asdict(),
        "rows": [
            {"name": row.name, "target": row.target, row.base[0]: found.base, row.own[0]: found.own}
            for row, found in rows
        ],
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")

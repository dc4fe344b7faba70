"""What every benchmark writes down, and the table it prints: no framework is imported here.

An `Entry` holds one comparison, raw: the values of both sides, one for each round. Ratios and medians are taken when
it is printed. A script's entries and the machine they come from are a `Results`, which is what `--json` writes and what
`bench.py` gathers.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from polyamp.files import write_atomically

SECTIONS = {
    "targets": "polyamp against its targets",
    "peers": "Other libraries, polyamp over each",
    "workloads": "Workloads, polyamp over the handwritten step",
    "replicas": "Several replicas, polyamp over the same loop by hand",
    "memory": "Peak memory of a step: activations, gradients and what the step allocates",
    "growth": "How overhead grows",
}
"""Section of an entry -> the heading of its table, in the order of the tables."""


class Side(msgspec.Struct, frozen=True):
    """One side's values, one for each round; an empty list where it could not be measured."""

    name: str
    values: list[float]

    @property
    def median(self) -> float:
        """Their median."""
        return statistics.median(self.values)

    def figure(self, unit: str) -> float:
        """The median; of a count, the largest, which a median would hide."""
        return self.median if unit else max(self.values)


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison, or one figure that is compared with nothing.

    Attributes:
        section: one of `SECTIONS`.
        name: what is measured, in a few words, the dtype among them.
        unit: of the values: "s" (printed as ms), "MiB", "us a tensor", "" for a count.
        own: polyamp's side, or what is measured.
        base: what it is measured against, or None.
        target: the largest ratio that is wanted, or the largest value where there is no base; None if only reported.
        distance: largest relative distance between the two sides' losses from the same start, checked before timing.
        note: what a reader must know, such as that a peer does not train, or why a side is missing.
    """

    section: str
    name: str
    unit: str
    own: Side
    base: Side | None = None
    target: float | None = None
    distance: float | None = None
    note: str = ""


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """All that one script measured.

    Attributes:
        script: its file below benchmarks, such as "torch/step.py".
        environment: versions, processor, threads.
        settings: how long it measured.
        entries: the figures.
        seconds: what the whole script took.
    """

    script: str
    environment: dict[str, Any]
    settings: dict[str, Any]
    entries: list[Entry]
    seconds: float


class Ratio(NamedTuple):
    """Of two lists of values, round by round: the median and the quartiles; and the smallest over the smallest."""

    median: float
    low: float
    high: float
    fastest: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}..{self.high:.3f})"


def ratio(own: Sequence[float], base: Sequence[float]) -> Ratio:
    """`own` over `base`: paired if they are as long, else of the medians alone."""
    if len(own) == len(base):
        each = [one / other for one, other in zip(own, base, strict=True)]
    else:
        each = [statistics.median(own) / statistics.median(base)]
    low, _, high = statistics.quantiles(each, n=4) if len(each) > 1 else (each[0],) * 3
    return Ratio(statistics.median(each), low, high, min(own) / min(base))


def measured(entry: Entry) -> bool:
    """Whether every side has values."""
    return bool(entry.own.values) and (entry.base is None or bool(entry.base.values))


def holds(entry: Entry) -> bool | None:
    """Whether the target is met, as measured; None without a target or without values."""
    if entry.target is None or not measured(entry):
        return None
    return (entry.own.figure(entry.unit) if entry.base is None else _ratio(entry).median) <= entry.target


def machine() -> dict[str, Any]:
    """Python and the processor."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return {
        "python": platform.python_version(),
        "processor": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "amx": "amx_bf16" in flags,
        "avx512_bf16": "avx512_bf16" in flags,
    }


def heading(*facts: dict[str, Any]) -> str:
    """What was measured on what, a line for each dict."""
    return "\n".join(", ".join(f"{name} {value}" for name, value in each.items()) for each in facts if each)


def write(path: Path, results: Results) -> None:
    """As JSON, raw; whole at any time, since `gpu.py` reads the file of a process that still writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def read(path: Path) -> Results:
    """What `write` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=Results)


# --- the tables

_HEADING = ("", "against", "", "measured", "", "ratio (quartiles)", "target", "", "losses apart")
_NUMBERS = (2, 4, 5, 8)
"""Columns that are set to the right."""


def text(entries: Iterable[Entry]) -> str:
    """The tables in plain text, one for each section, notes below."""
    parts = []
    for section, found in _sections(entries):
        lines = [_HEADING, *(_cells(entry) for entry in found)]
        widths = [max(len(line[place]) for line in lines) for place in range(len(_HEADING))]
        rows = [_HEADING, tuple("-" * width for width in widths), *lines[1:]]
        parts.append("\n".join([SECTIONS[section], "", *(_aligned(row, widths) for row in rows), *_notes(found)]))
    return "\n\n".join(parts)


def markdown(entries: Iterable[Entry]) -> str:
    """The same tables as Markdown."""
    parts = []
    rule = ["---:" if place in _NUMBERS else "---" for place in range(len(_HEADING))]
    for section, found in _sections(entries):
        lines = [f"| {' | '.join(row)} |" for row in (_HEADING, rule, *(_cells(entry) for entry in found))]
        notes = _notes(found)
        parts.append("\n".join([f"### {SECTIONS[section]}", "", *lines, *([""] if notes else []), *notes]))
    return "\n\n".join(parts) + "\n"


def _sections(entries: Iterable[Entry]) -> list[tuple[str, list[Entry]]]:
    listed = list(entries)
    parts = [(name, [entry for entry in listed if entry.section == name]) for name in SECTIONS]
    return [(name, found) for name, found in parts if found]


def _cells(entry: Entry) -> tuple[str, ...]:
    base = entry.base or Side("", [])
    known = measured(entry)
    return (
        entry.name,
        base.name,
        _amount(base, entry.unit),
        entry.own.name,
        _amount(entry.own, entry.unit),
        str(_ratio(entry)) if known and entry.base is not None else "",
        _wanted(entry),
        {True: "met", False: "missed", None: "" if known else "not measured"}[holds(entry)],
        "" if entry.distance is None else f"{entry.distance:.1e}",
    )


def _amount(side: Side, unit: str) -> str:
    if not side.values:
        return ""
    value = side.figure(unit)
    return {"s": f"{value * 1e3:.3f} ms", "": f"{value:g}"}.get(unit, f"{value:.3g} {unit}")


def _wanted(entry: Entry) -> str:
    if entry.target is None:
        return ""
    in_milliseconds = entry.base is None and entry.unit == "s"
    return f"<= {entry.target * 1e3:g} ms" if in_milliseconds else f"<= {entry.target:.3g}"


def _notes(entries: Sequence[Entry]) -> list[str]:
    lines = [
        f"- {entry.name}{f' ({entry.base.name})' if entry.base else ''}: {entry.note}."
        for entry in entries
        if entry.note
    ]
    return ["", *lines] if lines else []


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    placed = enumerate(zip(row, widths, strict=True))
    return "  ".join(cell.rjust(width) if n in _NUMBERS else cell.ljust(width) for n, (cell, width) in placed).rstrip()


def _ratio(entry: Entry) -> Ratio:
    assert entry.base is not None
    return ratio(entry.own.values, entry.base.values)

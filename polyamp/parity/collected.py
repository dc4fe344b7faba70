"""`report_of`: the report of a run from what its sides said and the traces that they left. Called by `run`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from polyamp._version import __version__
from polyamp.parity import trace as traces
from polyamp.parity.curves import curves_of
from polyamp.parity.findings import Comparison
from polyamp.parity.phases import FLOAT64, Phase
from polyamp.parity.processes import Side
from polyamp.parity.report import Report
from polyamp.parity.trace import Entry, Trace
from polyamp.parity.verdict import Ran, compared

_WHOLE: Final = math.inf
"""The step that a side did not finish, where it finished all."""


def report_of(sides: Sequence[Side], phases: Sequence[Phase], steps: int, randomness: str, seconds: float) -> Report:
    """What was found, as far as the sides came.

    Args:
        sides: the first one first.
        phases: that were to be run; a float64 that no side has is left out.
        steps: training steps.
        randomness: "off" or "shared".
        seconds: that everything took.
    """
    first, *others = sides
    began = [phase for phase in phases if any(side.trace_file(phase.name).exists() for side in sides)]
    recipes = {side.label: _plain(side) for side in sides if side.recipe is not None}
    return Report(
        polyamp=__version__,
        recipes=recipes,
        phases=[phase.shown for phase in began],
        steps=steps if recipes or not phases else 1,
        environments=[side.environment for side in sides if side.environment is not None],
        comparisons=[_comparison(first, other, began) for other in others if other.agreed is not None],
        curves=[
            curves_of(side.label, phase.shown, traces.read(side.trace_file(phase.name)))
            for phase in began
            for side in sides
            if side.trace_file(phase.name).exists()
        ],
        failures=[side.failure for side in sides if side.failure is not None],
        randomness=randomness,
        seconds=seconds,
        own_seconds=sum(trace.seconds for side in sides for trace in side.traces.values()),
    )


def _comparison(first: Side, other: Side, phases: Sequence[Phase]) -> Comparison:
    assert other.agreed is not None
    runs: list[tuple[Phase, Ran, Ran]] = []
    for phase in phases:
        one, two = _ran(first, phase), _ran(other, phase)
        if phase.name == FLOAT64:
            runs.append((phase, one or _nothing(first, phase), two or _nothing(other, phase)))
        elif one is not None and two is not None:
            runs.append((phase, *_as_far((one, two), (_cut(first, phase), _cut(other, phase)))))
    found = compared((first.label, other.label), runs, other.agreed, (first.recipe, other.recipe))
    return msgspec.structs.replace(found, notes=[*found.notes, *first.notes, *other.notes])


def _ran(side: Side, phase: Phase) -> Ran | None:
    """What a side did in a phase, as far as it came; None if it did not begin it."""
    path = side.trace_file(phase.name)
    if not path.exists():
        return None
    why = "" if side.failure is None else side.failure.reason
    trace = side.traces.get(phase.name) or Trace(side=side.label, phase=phase.name, ended=why)
    cut = _cut(side, phase) if phase.wide else _WHOLE
    return Ran(trace, lambda: (entry for entry in traces.read(path) if entry.step < cut))


def _cut(side: Side, phase: Phase) -> float:
    """The step of a phase that a side did not finish."""
    if phase.name in side.traces:
        return _WHOLE
    return side.step if side.failure is not None and side.failure.phase == phase.shown else 0


def _as_far(both: tuple[Ran, Ran], cuts: tuple[float, float]) -> tuple[Ran, Ran]:
    """Two runs, up to where the shorter one came: of a step that one did not finish what modules gave in the forward
    pass, where both have it. The rest of a step is judged by all of it, so that half of it would alarm."""
    cut = min(cuts)
    if cut == _WHOLE:
        return both
    shown = [
        {entry.module for entry in ran.entries() if _is_shown(entry, cut)}
        for ran, own in zip(both, cuts, strict=True)
        if own == cut
    ]
    modules = set.intersection(*shown)

    def kept(entry: Entry) -> bool:
        return entry.step < cut or (_is_shown(entry, cut) and entry.module in modules)

    one, two = (ran._replace(entries=functools.partial(_filtered, ran.entries, kept)) for ran in both)
    return one, two


def _is_shown(entry: Entry, step: float) -> bool:
    return entry.step == step and entry.stage == "forward" and entry.sketch is not None


def _filtered(entries: Callable[[], Iterable[Entry]], kept: Callable[[Entry], bool]) -> Iterator[Entry]:
    return filter(kept, entries())


def _nothing(side: Side, phase: Phase) -> Ran:
    return Ran(Trace(side=side.label, phase=phase.name), tuple)


def _plain(side: Side) -> dict[str, Any]:
    """A side's recipe as plain data."""
    assert side.recipe is not None
    plain: dict[str, Any] = msgspec.json.decode(side.recipe.to_json())
    return {**plain, "optimizer": {"type": side.optimizer}} if side.optimizer else plain

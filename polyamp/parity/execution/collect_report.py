"""`build_report`: the report of a run, from its sides' messages and trace files."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from polyamp._version import __version__
from polyamp.parity.execution.worker_pool import SideSpec
from polyamp.parity.findings import Comparison
from polyamp.parity.precisions import FLOAT64, Phase
from polyamp.parity.report.curves import curve_from_trace
from polyamp.parity.report.report import Report
from polyamp.parity.trace import trace as traces
from polyamp.parity.trace.trace import Entry, Trace
from polyamp.parity.verdict.verdict import PhaseTrace, compare_traces

_ALL_STEPS: Final = math.inf
"""Number of the unfinished step of a side that finished all steps."""


def build_report(
    sides: Sequence[SideSpec], phases: Sequence[Phase], steps: int, randomness: str, seconds: float
) -> Report:
    """Return the report of everything that the sides recorded.

    Args:
        sides: the first one first.
        phases: planned phases; float64 is left out if no side has it.
        steps: number of training steps.
        randomness: "off" or "shared".
        seconds: wall time of everything.
    """
    first, *others = sides
    began = [phase for phase in phases if any(side.trace_file(phase.name).exists() for side in sides)]
    recipes = {side.label: _recipe_data(side) for side in sides if side.recipe is not None}
    return Report(
        polyamp=__version__,
        recipes=recipes,
        phases=[phase.shown for phase in began],
        steps=steps if recipes or not phases else 1,
        environments=[side.environment for side in sides if side.environment is not None],
        comparisons=[_compare_sides(first, other, began) for other in others if other.agreed is not None],
        curves=[
            curve_from_trace(side.label, phase.shown, traces.read_entries(side.trace_file(phase.name)))
            for phase in began
            for side in sides
            if side.trace_file(phase.name).exists()
        ],
        failures=[side.failure for side in sides if side.failure is not None],
        randomness=randomness,
        seconds=seconds,
        own_seconds=sum(trace.seconds for side in sides for trace in side.traces.values()),
    )


def _compare_sides(first: SideSpec, other: SideSpec, phases: Sequence[Phase]) -> Comparison:
    assert other.agreed is not None
    runs: list[tuple[Phase, PhaseTrace, PhaseTrace]] = []
    for phase in phases:
        one, two = _phase_trace(first, phase), _phase_trace(other, phase)
        if phase.name == FLOAT64:
            runs.append((phase, one or _empty_phase_trace(first, phase), two or _empty_phase_trace(other, phase)))
        elif one is not None and two is not None:
            runs.append(
                (phase, *_truncate_traces((one, two), (_unfinished_step(first, phase), _unfinished_step(other, phase))))
            )
    found = compare_traces((first.label, other.label), runs, other.agreed, (first.recipe, other.recipe))
    return msgspec.structs.replace(found, notes=[*found.notes, *first.notes, *other.notes])


def _phase_trace(side: SideSpec, phase: Phase) -> PhaseTrace | None:
    """Return a side's trace of a phase, possibly truncated; None if it did not begin the phase."""
    path = side.trace_file(phase.name)
    if not path.exists():
        return None
    why = "" if side.failure is None else side.failure.reason
    trace = side.traces.get(phase.name) or Trace(side=side.label, phase=phase.name, ended=why)
    cut = _unfinished_step(side, phase) if phase.wide else _ALL_STEPS
    return PhaseTrace(trace, lambda: (entry for entry in traces.read_entries(path) if entry.step < cut))


def _unfinished_step(side: SideSpec, phase: Phase) -> float:
    """Return the number of the step of a phase that a side did not finish."""
    if phase.name in side.traces:
        return _ALL_STEPS
    return side.step if side.failure is not None and side.failure.phase == phase.shown else 0


def _truncate_traces(both: tuple[PhaseTrace, PhaseTrace], cuts: tuple[float, float]) -> tuple[PhaseTrace, PhaseTrace]:
    """Return two runs, truncated to the shorter one.

    Of an unfinished step only module outputs of the forward pass remain, where both have them. The tolerances of all
    other entries depend on the complete step.
    """
    cut = min(cuts)
    if cut == _ALL_STEPS:
        return both
    shown = [
        {entry.module for entry in ran.entries() if _is_module_output(entry, cut)}
        for ran, own in zip(both, cuts, strict=True)
        if own == cut
    ]
    modules = set.intersection(*shown)

    def kept(entry: Entry) -> bool:
        return entry.step < cut or (_is_module_output(entry, cut) and entry.module in modules)

    one, two = (ran._replace(entries=functools.partial(_filter_entries, ran.entries, kept)) for ran in both)
    return one, two


def _is_module_output(entry: Entry, step: float) -> bool:
    return entry.step == step and entry.stage == "forward" and entry.sketch is not None


def _filter_entries(entries: Callable[[], Iterable[Entry]], kept: Callable[[Entry], bool]) -> Iterator[Entry]:
    return filter(kept, entries())


def _empty_phase_trace(side: SideSpec, phase: Phase) -> PhaseTrace:
    return PhaseTrace(Trace(side=side.label, phase=phase.name), tuple)


def _recipe_data(side: SideSpec) -> dict[str, Any]:
    """Return a side's recipe as plain data."""
    assert side.recipe is not None
    plain: dict[str, Any] = msgspec.json.decode(side.recipe.to_json())
    return {**plain, "optimizer": {"type": side.optimizer}} if side.optimizer else plain

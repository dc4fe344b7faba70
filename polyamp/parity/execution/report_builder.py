"""`build_report`: the report of a run, from its sides' messages and trace files.

A further pass of sides that differ in a forward pass shows at which operation they part: `make_request`, `add_sites`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from polyamp._version import __version__
from polyamp.parity.execution.worker_messages import OperationRequest
from polyamp.parity.precisions import FLOAT32, FLOAT64, Phase, recipe_data
from polyamp.parity.report.report import Report
from polyamp.parity.report_data import Comparison, Curve, Environment, Failure
from polyamp.parity.trace import trace as traces
from polyamp.parity.trace.operation_log import OperationLog, PassLocation
from polyamp.parity.trace.trace import Entry, Trace
from polyamp.parity.verdict.alignment import Alignment
from polyamp.parity.verdict.operation_split import split_operations
from polyamp.parity.verdict.step_entries import PhaseTrace
from polyamp.parity.verdict.verdict import compare_traces
from polyamp.recipe.recipe import Recipe


@dataclasses.dataclass(kw_only=True)
class SideRecord:
    """Record of one side of a comparison.

    Attributes:
        label: name in reports.
        folder: folder of its trace files.
        environment: environment in which it runs.
        recipe: its recipe; None if nothing is trained.
        optimizer: description of a framework's own optimizer, which cannot be serialised; "" for one of polyamp's.
        records_operations: whether its backend records single operations.
        alignment: its alignment with the first side.
        phase, step: its current phase and step.
        traces: phase -> its trace without entries, once it has ended.
        notes: what it left out, and why.
        failure: why it did not finish.
    """

    label: str
    folder: Path
    environment: Environment | None = None
    recipe: Recipe | None = None
    optimizer: str = ""
    records_operations: bool = False
    alignment: Alignment | None = None
    phase: str = ""
    step: int = 0
    traces: dict[str, Trace] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    failure: Failure | None = None

    def trace_file(self, phase: str) -> Path:
        """Return the path of the trace file of a phase, which need not exist."""
        return self.folder / f"{phase}.trace"

    def end_phase(self, trace: Trace | None, note: str) -> None:
        """Record the end of a phase, as `Participant.record` returns it."""
        self.notes += [note] if note else []
        if trace is not None:
            self.traces[trace.phase] = trace


_ALL_STEPS: Final = math.inf
"""Number of the unfinished step of a side that finished all steps."""


def build_report(
    sides: Sequence[SideRecord], phases: Sequence[Phase], steps: int, randomness: str, began: float
) -> Report:
    """Return the report of everything that the sides recorded.

    Args:
        sides: the first one first.
        phases: planned phases; float64 is left out if no side has it.
        steps: number of training steps.
        randomness: "off" or "shared".
        began: `time.perf_counter()` at the start of everything.
    """
    first, *others = sides
    begun = [phase for phase in phases if any(side.trace_file(phase.name).exists() for side in sides)]
    recipes = {side.label: recipe_data(side.recipe, side.optimizer) for side in sides if side.recipe is not None}
    return Report(
        polyamp=__version__,
        recipes=recipes,
        phases=[phase.title for phase in begun],
        steps=steps if recipes or not phases else 1,
        environments=[side.environment for side in sides if side.environment is not None],
        comparisons=[_compare_sides(first, other, begun) for other in others if other.alignment is not None],
        curves=[
            curve_from_trace(side.label, phase.title, traces.read_entries(side.trace_file(phase.name)))
            for phase in begun
            for side in sides
            if side.trace_file(phase.name).exists()
        ],
        failures=[side.failure for side in sides if side.failure is not None],
        randomness=randomness,
        seconds=time.perf_counter() - began,
        own_seconds=sum(trace.seconds for side in sides for trace in side.traces.values()),
    )


def _compare_sides(first: SideRecord, other: SideRecord, phases: Sequence[Phase]) -> Comparison:
    assert other.alignment is not None
    runs: list[tuple[Phase, PhaseTrace, PhaseTrace]] = []
    for phase in phases:
        one, two = _phase_trace(first, phase), _phase_trace(other, phase)
        if phase.name == FLOAT64:
            runs.append((phase, one or _empty_phase_trace(first, phase), two or _empty_phase_trace(other, phase)))
        elif one is not None and two is not None:
            runs.append(
                (phase, *_truncate_traces((one, two), (_unfinished_step(first, phase), _unfinished_step(other, phase))))
            )
    found = compare_traces((first.label, other.label), runs, other.alignment, (first.recipe, other.recipe))
    return msgspec.structs.replace(found, notes=[*found.notes, *first.notes, *other.notes])


def _phase_trace(side: SideRecord, phase: Phase) -> PhaseTrace | None:
    """Return a side's trace of a phase, possibly truncated; None if it did not begin the phase."""
    path = side.trace_file(phase.name)
    if not path.exists():
        return None
    trace = side.traces.get(phase.name) or Trace(side=side.label, phase=phase.name)
    entries = functools.partial(traces.read_entries, path)
    cut = _unfinished_step(side, phase) if phase.wide else _ALL_STEPS
    if cut != _ALL_STEPS:
        entries = functools.partial(_filter_entries, entries, lambda entry: entry.step < cut)
    return PhaseTrace(trace, entries)


def _unfinished_step(side: SideRecord, phase: Phase) -> float:
    """Return the number of the step of a phase that a side did not finish."""
    if phase.name in side.traces:
        return _ALL_STEPS
    return side.step if side.failure is not None and side.failure.phase == phase.title else 0


def _truncate_traces(both: tuple[PhaseTrace, PhaseTrace], cuts: tuple[float, float]) -> tuple[PhaseTrace, PhaseTrace]:
    """Return two runs, truncated to the shorter one.

    Of an unfinished step only module outputs of the forward pass remain, where both have them. The tolerances of all
    other entries depend on the complete step.
    """
    cut = min(cuts)
    if cut == _ALL_STEPS:
        return both
    finished = [
        {entry.module for entry in run.entries() if _is_module_output(entry, cut)}
        for run, own in zip(both, cuts, strict=True)
        if own == cut
    ]
    modules = set.intersection(*finished)

    def is_comparable(entry: Entry) -> bool:
        return entry.step < cut or (_is_module_output(entry, cut) and entry.module in modules)

    one, two = (run._replace(entries=functools.partial(_filter_entries, run.entries, is_comparable)) for run in both)
    return one, two


def _is_module_output(entry: Entry, step: float) -> bool:
    return entry.step == step and entry.stage == "forward" and entry.sketch is not None


def _filter_entries(entries: Callable[[], Iterable[Entry]], condition: Callable[[Entry], bool]) -> Iterator[Entry]:
    return filter(condition, entries())


def _empty_phase_trace(side: SideRecord, phase: Phase) -> PhaseTrace:
    return PhaseTrace(Trace(side=side.label, phase=phase.name), tuple)


def curve_from_trace(side: str, phase: str, entries: Iterable[Entry]) -> Curve:
    """Return the metrics of every step.

    Args:
        side: label.
        phase: the phase's name.
        entries: of the run.
    """
    found: dict[str, list[float | None]] = {"loss": [], "grad_norm": [], "scale": []}
    skipped = []
    pass_losses: list[float | None] = []
    for entry in entries:
        if entry.number is None:
            continue
        number = entry.number if math.isfinite(entry.number) else None
        if entry.stage == "step" and entry.what in found:
            found[entry.what].append(number)
        elif entry.stage == "step" and entry.what == "finite" and not entry.number:
            skipped.append(entry.step)
        elif entry.stage == "forward" and entry.what == "loss":
            pass_losses.append(number)
    return Curve(
        side=side,
        phase=phase,
        loss=found["loss"] or pass_losses,
        grad_norm=found["grad_norm"],
        scale=found["scale"],
        skipped=skipped,
    )


def make_request(found: Comparison, sides: Sequence[SideRecord], phases: Sequence[Phase]) -> OperationRequest | None:
    """Return the request for a comparison; None where single operations would say nothing.

    They are recorded for a float32 forward pass of the first step, in float64 if both sides have that: there rounding
    hides nothing. Later steps start from other weights, and under a policy every value differs.

    Args:
        found: the comparison.
        sides: records of its two sides.
        phases: the phases of the run.
    """
    first = found.first
    if not all(side.records_operations for side in sides):
        return None
    if first is None or (first.phase, first.step, first.stage) != (FLOAT32, 1, "forward") or len(first.sides) != 2:
        return None
    is_wide = all(FLOAT64 in side.traces for side in sides)
    phase = next((each for each in phases if each.name == (FLOAT64 if is_wide else FLOAT32)), None)
    if phase is None:
        return None
    what = first.what.partition(",")[0]
    return OperationRequest(
        phase=phase, locations={label: PassLocation(side.path, what) for label, side in first.sides.items()}
    )


def add_sites(report: Report, number: int, logs: Mapping[str, OperationLog]) -> Report:
    """Return a report with the operations at which the sides of one of its comparisons part.

    Args:
        report: the report.
        number: index of the comparison.
        logs: label -> operations of its two sides.
    """
    found = report.comparisons[number]
    if found.first is None:
        return report
    one, two = (logs[label] for label in found.sides)
    sites = dict(zip(found.sides, split_operations(one, two, found.first.distance), strict=False))
    first = msgspec.structs.replace(found.first, sites=sites)
    return _replace_comparison(report, number, first=first)


def add_note(report: Report, number: int, note: str) -> Report:
    """Return a report with a further note on one of its comparisons."""
    return _replace_comparison(report, number, notes=[*report.comparisons[number].notes, note])


def failed_pass_note(label: str, message: str) -> str:
    """Return the note for a side whose operations could not be recorded."""
    return f"the operations of {label} could not be recorded one by one: {message.partition(chr(10))[0]}"


def _replace_comparison(report: Report, number: int, **changes: Any) -> Report:
    comparisons = list(report.comparisons)
    comparisons[number] = msgspec.structs.replace(comparisons[number], **changes)
    return msgspec.structs.replace(report, comparisons=comparisons)

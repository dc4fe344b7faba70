"""`SideRecord`: what one side of a comparison has recorded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from polyamp.parity.findings import Environment, Failure
from polyamp.parity.trace.trace import Trace
from polyamp.parity.verdict.alignment import Alignment
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

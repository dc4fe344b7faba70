"""`curve_from_trace`: the metrics of a run's steps, read from its trace."""

from __future__ import annotations

import math
from collections.abc import Iterable

from polyamp.parity.report.report import Curve
from polyamp.parity.trace.trace import Entry


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

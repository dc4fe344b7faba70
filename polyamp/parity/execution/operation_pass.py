"""The further pass that shows at which operation two sides part, once they are known to differ in a forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from polyamp.parity.execution.report_builder import SideRecord
from polyamp.parity.execution.worker_messages import OperationRequest
from polyamp.parity.precisions import FLOAT32, FLOAT64, Phase
from polyamp.parity.report.report import Report
from polyamp.parity.report_data import Comparison
from polyamp.parity.trace.operation_log import OperationLog, PassLocation
from polyamp.parity.verdict.operation_split import split_operations


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

"""`record_operations`: the further pass of sides that differ, in new processes, after a run has ended its own.

The processes of the run cannot wait for the verdict: each would keep its memory while the others train.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from polyamp.parity.execution import exchange_files
from polyamp.parity.execution.report_builder import add_note, add_sites, failed_pass_note, make_request
from polyamp.parity.execution.worker_messages import OPERATIONS_FILE, SideJob
from polyamp.parity.execution.worker_pool import SideProcess, WorkerPool
from polyamp.parity.precisions import Phase
from polyamp.parity.report.report import Report


def record_operations(
    report: Report,
    sides: Sequence[SideProcess],
    jobs: Sequence[SideJob],
    phases: Sequence[Phase],
    folder: Path,
    timeout: float,
) -> Report:
    """Return a report with the operations at which its sides part, for each comparison that differs in a forward pass.

    Args:
        report: of the run.
        sides, jobs: of the run, the first side first.
        phases: of the run.
        folder: folder of the run, which holds what the jobs refer to.
        timeout: time limit of a side's work in seconds.
    """
    by_label = {job.side: (side, job) for side, job in zip(sides, jobs, strict=True)}
    for number, found in enumerate(report.comparisons):
        both = [by_label[label] for label in found.sides]
        request = make_request(found, [side for side, _ in both], phases)
        if request is not None:
            processes = [
                _process(side, msgspec.structs.replace(job, number=place, operations=request), folder)
                for place, (side, job) in enumerate(both)
            ]
            report = _run(report, number, processes, folder, timeout)
    return report


def _process(side: SideProcess, job: SideJob, folder: Path) -> SideProcess:
    """Return the process that records one of two sides."""
    own = folder / f"operations-{job.number}"
    own.mkdir(exist_ok=True)
    job = msgspec.structs.replace(job, traces=str(own))
    return SideProcess(label=side.label, folder=own, job=job, python=side.python)


def _run(report: Report, number: int, processes: Sequence[SideProcess], folder: Path, timeout: float) -> Report:
    WorkerPool(processes, folder, timeout, _ignore_event).run()
    for process in processes:
        if process.failure is not None:
            return add_note(report, number, failed_pass_note(process.label, process.failure.message))
    logs = {each.label: exchange_files.read_object(each.folder / OPERATIONS_FILE) for each in processes}
    return add_sites(report, number, logs)


def _ignore_event(event: Any) -> None:
    """Discard an event: for who listens, the run is over."""

"""`examine`: measure the devices of several frameworks, each in a worker process, one measurement at a time."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final, Literal, NamedTuple

import msgspec

from polyamp.doctor.device_capabilities import Capabilities
from polyamp.doctor.worker_messages import (
    DeviceMessage,
    ProbeJob,
    ProbeMessage,
    ProgressMessage,
    ReadyMessage,
)
from polyamp.worker_processes import OutputQueue, Reaper, Worker

TIMEOUT: Final = 300.0
"""Seconds that the import of a framework may take, and the measurement of all its devices."""
_WORKER_MODULE: Final = "polyamp.doctor.worker"


class BackendExamination(NamedTuple):
    """What was found of one backend.

    Attributes:
        version: the framework's version; None if it cannot be imported.
        devices: names of its devices.
        capabilities: what was measured, device by device; empty for a backend without a probe.
        problem: what went wrong; None if nothing did.
        problem_kind: "argument" for a device that does not exist.
    """

    version: str | None = None
    devices: tuple[str, ...] = ()
    capabilities: tuple[Capabilities, ...] = ()
    problem: str | None = None
    problem_kind: Literal["argument", "backend"] = "backend"


class ExaminationEvent(NamedTuple):
    """Progress of one backend.

    Attributes:
        backend: its name.
        phase: "import", "wait" for its turn, "measure", or "end".
        device: the device that is measured.
        done, total: parts of that device's measurement.
    """

    backend: str
    phase: Literal["import", "wait", "measure", "end"]
    device: str = ""
    done: int = 0
    total: int = 1


OnEvent = Callable[[ExaminationEvent], None]


def examine(
    backends: Sequence[str],
    *,
    device: str | None = None,
    all_devices: bool = False,
    float8: bool = False,
    timeout: float = TIMEOUT,
    on_event: OnEvent | None = None,
    module: str = _WORKER_MODULE,
) -> dict[str, BackendExamination]:
    """Measure the devices of these backends. Frameworks are imported at the same time and measured one by one.

    Args:
        backends: names of registered backends.
        device: the device of each; None for the default one.
        all_devices: measure each model of device once.
        float8: measure products in 8 bits too.
        timeout: seconds that an import, or all measurements of a backend, may take.
        on_event: called with the progress, in this thread.
        module: the workers' main program.
    """
    with tempfile.TemporaryDirectory(prefix="polyamp-doctor-") as folder, ExitStack() as stack:
        reaper = stack.enter_context(Reaper(Path(folder)))
        output: OutputQueue = SimpleQueue()
        run = _Examination(timeout, on_event or _ignore_event)
        for name in backends:
            log = Path(folder, f"{name}.log")
            worker = stack.enter_context(Worker(name, sys.executable, module, log=log, output=output, reaper=reaper))
            job = ProbeJob(backend=name, device=device, all_devices=all_devices, float8=float8)
            run.start(worker, msgspec.json.encode(job) + b"\n")
        run.follow(output)
        return {name: run.found[name] for name in backends}


class _Examination:
    """The workers, and what they reported."""

    def __init__(self, timeout: float, on_event: OnEvent) -> None:
        self.found: dict[str, BackendExamination] = {}
        self._timeout, self._on_event = timeout, on_event
        self._deadlines: dict[Worker, float] = {}
        self._waiting: list[Worker] = []
        self._measuring: Worker | None = None

    def start(self, worker: Worker, job: bytes) -> None:
        """Send a worker its job."""
        self.found[worker.name] = BackendExamination()
        self._deadlines[worker] = time.monotonic() + self._timeout
        self._on_event(ExaminationEvent(worker.name, "import"))
        worker.send(job)

    def follow(self, output: OutputQueue) -> None:
        """Read messages until all workers are done."""
        while self._deadlines:
            try:
                worker, line = output.get(timeout=1.0)
            except Empty:
                for late in [worker for worker, end in self._deadlines.items() if time.monotonic() > end]:
                    doing = "measurement" if late is self._measuring else "import"
                    self._finish(late, f"its {doing} did not end within {self._timeout:g} s")
                continue
            if worker not in self._deadlines:
                continue
            if line is None:
                self._finish(worker, _end_text(worker))
            else:
                self._receive(worker, msgspec.json.decode(line, type=ProbeMessage))

    def _receive(self, worker: Worker, message: ProbeMessage) -> None:
        found = self.found[worker.name]
        if isinstance(message, ReadyMessage):
            self.found[worker.name] = found._replace(version=message.version, devices=tuple(message.devices))
            if message.measurable:
                self._deadlines[worker] = float("inf")
                self._waiting.append(worker)
                self._on_event(ExaminationEvent(worker.name, "wait"))
        elif isinstance(message, ProgressMessage):
            event = ExaminationEvent(worker.name, "measure", message.device, message.done, message.total)
            self._on_event(event)
        elif isinstance(message, DeviceMessage):
            self.found[worker.name] = found._replace(capabilities=(*found.capabilities, message.capabilities))
        else:
            self.found[worker.name] = found._replace(problem_kind=message.kind)
            self._finish(worker, message.problem)
        self._next()

    def _finish(self, worker: Worker, problem: str | None) -> None:
        """Record the end of a worker, and end it if it still runs."""
        self.found[worker.name] = self.found[worker.name]._replace(problem=problem)
        del self._deadlines[worker]
        self._waiting = [other for other in self._waiting if other is not worker]
        self._measuring = None if self._measuring is worker else self._measuring
        worker.end()
        self._on_event(ExaminationEvent(worker.name, "end"))
        self._next()

    def _next(self) -> None:
        """Let the next worker measure."""
        if self._measuring is None and self._waiting:
            self._measuring = self._waiting.pop(0)
            self._deadlines[self._measuring] = time.monotonic() + self._timeout
            self._measuring.send(b"\n")


def _end_text(worker: Worker) -> str:
    """Return what to say of a worker that ended without a last message."""
    lines = worker.tail().splitlines()
    last = f": {lines[-1]}" if lines else ""
    return f"its process ended with status {worker.status()}{last}"


def _ignore_event(event: ExaminationEvent) -> None:
    """Ignore progress."""

"""`WorkerPool`: starts, drives and ends the worker processes of a run.

The first side builds its model and writes its weights; the others build theirs and align with them; then all train, a
limited number at once. Any failure of a worker becomes a `Failure` of its side; the others continue.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, Literal

import msgspec

from polyamp._version import __version__
from polyamp.parity.execution import worker_messages
from polyamp.parity.execution.report_builder import SideRecord
from polyamp.parity.execution.worker_messages import (
    FailureReason,
    InternalMessage,
    TrainCommand,
    WorkerJob,
    WorkerMessage,
)
from polyamp.parity.precisions import Phase, comparison_phases
from polyamp.parity.report_data import Failure
from polyamp.recipe.recipe import Recipe
from polyamp.worker_processes import OutputQueue, Reaper, Worker

WORKER_MODULE: Final = "polyamp.parity.execution.side_worker"
_EXTERNAL_SIGNALS: Final = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")

SideStage = Literal["new", "busy", "ready", "done", "failed"]


@dataclasses.dataclass(kw_only=True)
class SideProcess(SideRecord):
    """State of the process of one side of a run.

    Attributes:
        job: its job.
        python: its interpreter.
        stage: "busy" while it works, "ready" while it waits for the others.
        worker: its process.
        spent: seconds that it worked until `since`.
        since: time of the last command to continue.
    """

    job: WorkerJob
    python: str
    stage: SideStage = "new"
    worker: Worker | None = None
    spent: float = 0.0
    since: float = 0.0

    @property
    def log(self) -> Path:
        """File of its standard error."""
        return self.folder / "log.txt"


class WorkerPool:
    """Worker processes of a run.

    Args:
        sides: the first one first.
        folder: folder of the run, which the caller removes.
        timeout: time limit of a side's work in seconds; waiting for others does not count.
        on_event: called with every event.
        at_once: number of sides that may work at a time.
        module: main program of the workers.
        message_type: union of the messages that they send.
    """

    def __init__(
        self,
        sides: Sequence[SideProcess],
        folder: Path,
        timeout: float,
        on_event: Callable[[Any], None],
        *,
        at_once: int = 1,
        module: str = WORKER_MODULE,
        message_type: Any = WorkerMessage,
    ) -> None:
        self._sides, self._folder, self._timeout, self._at_once = sides, folder, timeout, at_once
        self._notify, self._module = on_event, module
        self._decoder = msgspec.json.Decoder(message_type)
        self._worker_output: OutputQueue = SimpleQueue()
        self._batch_digests: dict[int, tuple[str, str]] = {}
        self.phases: list[Phase] = []

    def run(self, *, aligned: bool = True) -> None:
        """Run all sides to their end. An interruption ends all workers and marks unfinished sides as interrupted.

        Args:
            aligned: whether the sides align with the first one before they train; else each works for itself.
        """
        with ExitStack() as stack:
            reaper = stack.enter_context(Reaper(self._folder))

            def start(side: SideProcess) -> None:
                self._start(side, reaper, stack)

            try:
                if aligned:
                    self._run_aligned(start)
                else:
                    self._run_until_idle(self._sides, start)
            except BaseException:
                for side in self._sides:
                    if side.stage not in ("done", "failed"):
                        self._fail(side, "interrupted", "the run was interrupted before this side was done")
                raise

    def _run_aligned(self, start: Callable[[SideProcess], None]) -> None:
        first, *others = self._sides
        self._run_until_idle([first], start)
        if first.stage == "ready":
            self._run_until_idle(others, start)
        aligned = [side for side in self._sides if side.stage == "ready"]
        if first.stage == "ready" and len(aligned) > 1:
            self._run_until_idle(aligned, self._send_train_command(aligned))

    def _start(self, side: SideProcess, reaper: Reaper, stack: ExitStack) -> None:
        self._notify(worker_messages.SideLaunchEvent(side=side.label))
        try:
            side.worker = Worker(
                side.label, side.python, self._module, log=side.log, output=self._worker_output, reaper=reaper
            )
        except OSError as error:
            self._fail(
                side,
                "error",
                f"the interpreter {side.python} cannot be started: {error.strerror or error}. interpreters= "
                "(--interpreter LABEL=PATH) names the Python of a side's environment.",
            )
            return
        stack.callback(side.worker.end)

    def _send_train_command(self, sides: Sequence[SideProcess]) -> Callable[[SideProcess], None]:
        """Return a function that sends a side the command to train."""
        most = max(side.environment.parameters for side in sides if side.environment is not None)
        self.phases = comparison_phases(tuple(side.recipe for side in sides), most)
        numbers = [number for number, side in enumerate(self._sides) if side.stage == "ready"]
        train = TrainCommand(phases=self.phases, others=numbers[1:])

        def send(side: SideProcess) -> None:
            if side.worker is not None:
                side.worker.send(msgspec.json.encode(train) + b"\n")

        return send

    def _run_until_idle(self, sides: Sequence[SideProcess], begin: Callable[[SideProcess], None]) -> None:
        """Let sides work, `at_once` at a time, until each is idle or has failed."""
        waiting = deque(sides)
        while waiting or any(side.stage == "busy" for side in self._sides):
            busy = [side for side in self._sides if side.stage == "busy"]
            if waiting and len(busy) < self._at_once:
                side = waiting.popleft()
                if side.stage != "failed":
                    side.stage, side.since = "busy", time.perf_counter()
                    begin(side)
                continue
            try:
                worker, line = self._worker_output.get(timeout=max(0.0, min(map(self._seconds_left, busy))))
            except Empty:
                for side in busy:
                    if self._seconds_left(side) <= 0.0:
                        self._handle_timeout(side)
                continue
            sender = next(side for side in self._sides if side.worker is worker)
            if sender.stage not in ("done", "failed"):
                self._handle_line(sender, line)

    def _seconds_left(self, side: SideProcess) -> float:
        return self._timeout - side.spent - (time.perf_counter() - side.since)

    def _set_idle(self, side: SideProcess, stage: SideStage) -> None:
        """Mark a side as idle, for now or for good."""
        side.spent += time.perf_counter() - side.since
        side.stage = stage

    def _handle_line(self, side: SideProcess, line: bytes | None) -> None:
        if line is None:
            self._handle_exit(side)
            return
        try:
            event = self._decoder.decode(line)
        except msgspec.DecodeError:
            self._fail(
                side, "error", f"{side.python} sent what polyamp {__version__} cannot read{self._stderr_tail(side)}"
            )
            return
        self._handle_message(side, event)
        if not isinstance(event, InternalMessage):
            self._notify(event)

    def _handle_message(self, side: SideProcess, event: Any) -> None:
        assert side.worker is not None
        if isinstance(event, worker_messages.HandshakeEvent):
            if event.polyamp != __version__:
                self._fail(
                    side,
                    "error",
                    f"{side.python} has polyamp {event.polyamp}, and the run was started by polyamp {__version__}. "
                    f"Install the same there: {side.python} -m pip install polyamp=={__version__}",
                )
                return
            side.worker.send(msgspec.json.encode(side.job) + b"\n")
        elif isinstance(event, worker_messages.SideBuildEvent):
            side.environment, side.optimizer = event.environment, event.optimizer
            side.records_operations = event.records_operations
            side.recipe = None if event.recipe is None else Recipe.from_json(event.recipe)
        elif isinstance(event, worker_messages.SideReadyEvent):
            side.alignment = event.alignment
            self._set_idle(side, "ready")
        elif isinstance(event, worker_messages.SideProgressEvent):
            side.phase, side.step = event.phase, event.step
        elif isinstance(event, worker_messages.BatchDigestEvent):
            self._check_batch_digest(side, event)
        elif isinstance(event, worker_messages.PhaseEndEvent):
            side.end_phase(event.trace, event.note)
        elif isinstance(event, worker_messages.SideFinishEvent):
            self._set_idle(side, "done")
            side.worker.end()
        elif isinstance(event, worker_messages.SideFailureEvent):
            side.failure = event.failure
            self._set_idle(side, "failed")
            side.worker.end()

    def _check_batch_digest(self, side: SideProcess, event: worker_messages.BatchDigestEvent) -> None:
        label, known = self._batch_digests.setdefault(event.step, (side.label, event.digest))
        if known != event.digest:
            self._fail(
                side,
                "error",
                f"randomness in the data: data({event.step}) gave other arrays here than in {label!r}, so that the "
                "sides would not train on the same. A data function must give the same arrays in every process: seed "
                "it with the step, numpy.random.default_rng(step), or give the arrays themselves.",
            )

    def _handle_exit(self, side: SideProcess) -> None:
        """Handle the exit of a process that did not report its end."""
        assert side.worker is not None
        status = side.worker.status()
        tail = self._stderr_tail(side)
        if status is None:
            self._fail(side, "crashed", f"the process closed its standard output, and was ended{tail}")
        elif status < 0:
            name = _signal_name(-status)
            killed = name in _EXTERNAL_SIGNALS
            memory = ": the system does so when memory runs out" if name == "SIGKILL" else ""
            cause = f"was killed by {name}{memory}" if killed else f"crashed with {name}"
            self._fail(side, "killed" if killed else "crashed", f"the process {cause}{tail}")
        elif side.environment is None and "No module named polyamp" in tail.replace("'", ""):
            self._fail(
                side,
                "error",
                f"{side.python} has no polyamp {__version__}. Install it there: {side.python} -m pip install "
                f"polyamp=={__version__}{tail}",
            )
        else:
            self._fail(side, "crashed", f"the process ended itself with exit status {status}{tail}")

    def _handle_timeout(self, side: SideProcess) -> None:
        assert side.worker is not None
        side.worker.dump_stacks()
        self._fail(
            side,
            "timeout",
            f"ended after the time limit of {self._timeout:g} s (timeout=){self._stderr_tail(side)}",
        )

    def _fail(self, side: SideProcess, reason: FailureReason, message: str) -> None:
        side.failure = Failure(side=side.label, phase=side.phase, step=side.step, reason=reason, message=message)
        self._set_idle(side, "failed")
        if side.worker is not None:
            side.worker.end()
        if reason != "interrupted":
            self._notify(worker_messages.SideFailureEvent(failure=side.failure))

    def _stderr_tail(self, side: SideProcess) -> str:
        """Return the end of a side's standard error, to append to a message."""
        assert side.worker is not None
        tail = side.worker.tail()
        return f". The end of its standard error:\n{tail}" if tail else ". It wrote nothing to standard error."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

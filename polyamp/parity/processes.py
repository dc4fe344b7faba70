"""`Processes`: the workers of a run, from their start to their end, and what became of each. Called by `run`.

The first side builds its model and gives its weights away; the others build theirs and find themselves in these; then
all train, so many at once. Whatever a worker does, or is done to it, becomes a `Failure` of its side; the others go on.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, Literal

import msgspec

from polyamp._version import __version__
from polyamp.parity import jobs
from polyamp.parity.aligned import Agreed
from polyamp.parity.findings import Environment, Failure
from polyamp.parity.jobs import Event, Job, Reason, Said, Train
from polyamp.parity.phases import Phase, phases_of
from polyamp.parity.trace import Trace
from polyamp.recipe.recipe import Recipe
from polyamp.workers import Guard, Heard, Worker

MODULE: Final = "polyamp.parity.worker"
_SAID: Final = msgspec.json.Decoder(Said)
_FROM_OUTSIDE: Final = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")

Stage = Literal["new", "busy", "ready", "done", "failed"]


@dataclasses.dataclass
class Side:
    """One side of a run, as whoever started it knows it.

    Attributes:
        job: what it is to do.
        python: its interpreter.
        log: what it wrote to standard error.
        stage: "busy" while it works, "ready" while it waits for the others.
        phase, step: where it is.
        environment, recipe, optimizer, agreed: what it said of itself.
        traces: phase -> what it said of it when it was done.
        notes: what it left out, and why.
        failure: why it came to no end.
        worker: its process.
        spent: seconds that it worked until `since`.
        since: when it was told to go on.
    """

    job: Job
    python: str
    log: Path
    stage: Stage = "new"
    phase: str = ""
    step: int = 0
    environment: Environment | None = None
    recipe: Recipe | None = None
    optimizer: str = ""
    agreed: Agreed | None = None
    traces: dict[str, Trace] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    failure: Failure | None = None
    worker: Worker | None = None
    spent: float = 0.0
    since: float = 0.0

    @property
    def label(self) -> str:
        """What reports call it."""
        return self.job.side

    def trace_file(self, phase: str) -> Path:
        """Where the entries of a phase are, or were to be."""
        return Path(self.job.traces) / f"{phase}.trace"


class Processes:
    """The workers of a run.

    Args:
        sides: the first one first.
        timeout: seconds that a side may work; waiting for others does not count.
        at_once: how many sides may work at a time.
        tell: gets the events.
    """

    def __init__(self, sides: Sequence[Side], timeout: float, at_once: int, tell: Callable[[Event], None]) -> None:
        self._sides, self._timeout, self._at_once, self._tell = sides, timeout, at_once, tell
        self._heard: Heard = SimpleQueue()
        self._given: dict[int, tuple[str, str]] = {}
        self.phases: list[Phase] = []

    def run(self) -> None:
        """Everything. Interrupted, it ends all workers, and says of each that is not done that it was."""
        first, *others = self._sides
        with ExitStack() as stack:
            guard = stack.enter_context(Guard(Path(first.job.folder)))

            def start(side: Side) -> None:
                self._start(side, guard, stack)

            try:
                self._go([first], start)
                if first.stage == "ready":
                    self._go(others, start)
                met = [side for side in others if side.stage == "ready"]
                if first.stage == "ready" and met:
                    self._go([first, *met], self._train(met))
            except BaseException:
                for side in self._sides:
                    if side.stage not in ("done", "failed"):
                        self._fail(side, "interrupted", "the run was interrupted before this side was done")
                raise

    def _start(self, side: Side, guard: Guard, stack: ExitStack) -> None:
        self._tell(jobs.Starting(side=side.label))
        try:
            side.worker = Worker(side.label, side.python, MODULE, log=side.log, heard=self._heard, guard=guard)
        except OSError as error:
            self._fail(
                side,
                "error",
                f"the interpreter {side.python} cannot be started: {error.strerror or error}. interpreters= "
                "(--interpreter LABEL=PATH) names the Python of a side's environment.",
            )
            return
        stack.callback(side.worker.end)

    def _train(self, met: Iterable[Side]) -> Callable[[Side], None]:
        """What tells a side to train, now that all are known."""
        sides = [self._sides[0], *met]
        most = max(side.environment.parameters for side in sides if side.environment is not None)
        self.phases = phases_of(tuple(side.recipe for side in sides), most)
        train = Train(phases=self.phases, others=[side.job.number for side in sides[1:]])

        def tell(side: Side) -> None:
            if side.worker is not None:
                side.worker.send(msgspec.json.encode(train) + b"\n")

        return tell

    def _go(self, sides: Sequence[Side], begin: Callable[[Side], None]) -> None:
        """Have sides work, so many at a time, until each has an answer or has failed."""
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
                worker, line = self._heard.get(timeout=max(0.0, min(map(self._left, busy))))
            except Empty:
                for side in busy:
                    if self._left(side) <= 0.0:
                        self._expire(side)
                continue
            heard = next(side for side in self._sides if side.worker is worker)
            if heard.stage not in ("done", "failed"):
                self._hear(heard, line)

    def _left(self, side: Side) -> float:
        return self._timeout - side.spent - (time.perf_counter() - side.since)

    def _rest(self, side: Side, stage: Stage) -> None:
        """A side has nothing to do for now, or no more."""
        side.spent += time.perf_counter() - side.since
        side.stage = stage

    def _hear(self, side: Side, line: bytes | None) -> None:
        if line is None:
            self._died(side)
            return
        try:
            event = _SAID.decode(line)
        except msgspec.DecodeError:
            self._fail(side, "error", f"{side.python} sent what polyamp {__version__} cannot read{self._tail(side)}")
            return
        self._take(side, event)
        if isinstance(event, Event):
            self._tell(event)

    def _take(self, side: Side, event: Any) -> None:
        assert side.worker is not None
        if isinstance(event, jobs.Hello):
            if event.polyamp != __version__:
                self._fail(
                    side,
                    "error",
                    f"{side.python} has polyamp {event.polyamp}, and the run was started by polyamp {__version__}. "
                    f"Install the same there: {side.python} -m pip install polyamp=={__version__}",
                )
                return
            side.worker.send(msgspec.json.encode(side.job) + b"\n")
        elif isinstance(event, jobs.Started):
            side.environment, side.optimizer = event.environment, event.optimizer
            side.recipe = None if event.recipe is None else Recipe.from_json(event.recipe)
        elif isinstance(event, jobs.Ready):
            side.agreed = event.agreed
            self._rest(side, "ready")
        elif isinstance(event, jobs.Progress):
            side.phase, side.step = event.phase, event.step
        elif isinstance(event, jobs.Given):
            self._check_given(side, event)
        elif isinstance(event, jobs.Ended):
            side.notes += [event.note] if event.note else []
            if event.trace is not None:
                side.traces[event.trace.phase] = event.trace
        elif isinstance(event, jobs.Finished):
            self._rest(side, "done")
            side.worker.end()
        elif isinstance(event, jobs.Failed):
            side.failure = event.failure
            self._rest(side, "failed")
            side.worker.end()

    def _check_given(self, side: Side, event: jobs.Given) -> None:
        label, known = self._given.setdefault(event.step, (side.label, event.digest))
        if known != event.digest:
            self._fail(
                side,
                "error",
                f"randomness in the data: data({event.step}) gave other arrays here than in {label!r}, so that the "
                "sides would not train on the same. A data function must give the same arrays in every process: seed "
                "it with the step, numpy.random.default_rng(step), or give the arrays themselves.",
            )

    def _died(self, side: Side) -> None:
        """A process is gone, and did not say that it was done."""
        assert side.worker is not None
        status = side.worker.status()
        tail = self._tail(side)
        if status is None:
            self._fail(side, "crashed", f"the process closed its standard output, and was ended{tail}")
        elif status < 0:
            name = _signal(-status)
            killed = name in _FROM_OUTSIDE
            memory = ": the system does so when memory runs out" if name == "SIGKILL" else ""
            said = f"the process was killed by {name}{memory}" if killed else f"the process crashed with {name}"
            self._fail(side, "killed" if killed else "crashed", f"{said}{tail}")
        elif side.environment is None and f"No module named {MODULE.partition('.')[0]}" in tail.replace("'", ""):
            self._fail(
                side,
                "error",
                f"{side.python} has no polyamp {__version__}. Install it there: {side.python} -m pip install "
                f"polyamp=={__version__}{tail}",
            )
        else:
            self._fail(side, "crashed", f"the process ended itself with exit status {status}{tail}")

    def _expire(self, side: Side) -> None:
        assert side.worker is not None
        side.worker.tell_where()
        self._fail(
            side,
            "timeout",
            f"ended after the time limit of {self._timeout:g} s (timeout=){self._tail(side)}",
        )

    def _fail(self, side: Side, reason: Reason, message: str) -> None:
        side.failure = Failure(side=side.label, phase=side.phase, step=side.step, reason=reason, message=message)
        self._rest(side, "failed")
        if side.worker is not None:
            side.worker.end()
        if reason != "interrupted":
            self._tell(jobs.Failed(failure=side.failure))

    def _tail(self, side: Side) -> str:
        """The end of what it wrote, to be put behind a message."""
        assert side.worker is not None
        said = side.worker.tail()
        return f". The end of its standard error:\n{said}" if said else ". It wrote nothing to standard error."


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

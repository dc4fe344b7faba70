"""Main program of a side's worker process.

It reads a `SideJob` and later a `TrainCommand` from standard input, a JSON line each, and writes one event per line to
standard output. Output of the user's code goes to standard error. Traces go to files, entry by entry.
"""

from __future__ import annotations

import platform
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, TypeVar

import msgspec

from polyamp._version import __version__
from polyamp.contract import registry
from polyamp.errors import BackendNotInstalledError, PolyampError, RecipeError
from polyamp.parity.execution import messages, weight_exchange
from polyamp.parity.execution.array_store import BatchTree, batch_digest, load_batch
from polyamp.parity.execution.function_ref import FunctionRef, add_import_paths
from polyamp.parity.execution.messages import OwnLoopSpec, SideJob, TrainCommand, WorkerMessage
from polyamp.parity.execution.participant import Participant
from polyamp.parity.execution.recorder import ParticipantAlignment
from polyamp.parity.findings import Failure
from polyamp.parity.own_loop import OwnLoop
from polyamp.parity.precisions import Phase, recipe_json, without_judge
from polyamp.parity.trace.trace import Entry, TraceWriter
from polyamp.porting.check import Batch, ChannelOrderAdapter
from polyamp.recipe.recipe import Recipe
from polyamp.worker_processes import claim_stdio

EmitMessage = Callable[[WorkerMessage], None]
_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_TRACEBACK_LINES: Final = 12
"""Number of traceback lines in a message."""


def main() -> None:
    """Run the job from standard input."""
    channel = claim_stdio()

    def emit(event: WorkerMessage) -> None:
        channel.lines.write(msgspec.json.encode(event).decode() + "\n")
        channel.lines.flush()

    emit(messages.HandshakeEvent(polyamp=__version__, python=platform.python_version()))
    job = _read_message(channel.commands, SideJob)
    if job is not None:
        _SideWorker(job, emit, channel.commands).run_to_end()


class _SideWorker:
    """Execution of one side's job, with its current activity."""

    def __init__(self, job: SideJob, emit: EmitMessage, commands: IO[bytes]) -> None:
        self._job, self._emit, self._commands = job, emit, commands
        self._activity = "before it began"
        self._phase, self._step = "", 0
        self._steps = 1
        self._loss: float | None = None
        self._digests: dict[int, str] = {}

    def run_to_end(self) -> None:
        """Run the whole job; an exception becomes the last event."""
        try:
            self._run_job()
        except BaseException as error:  # noqa: BLE001  # sys.exit() in the user's code must be reported too
            traceback.print_exc()
            failure = Failure(
                side=self._job.side,
                phase=self._phase,
                step=self._step,
                reason="missing" if _is_missing_framework(error) else "error",
                message=f"{self._activity}: {_error_text(error, self._job.side)}",
            )
            self._emit(messages.SideFailureEvent(failure=failure))

    def _run_job(self) -> None:
        job = self._job
        folder = Path(job.folder)
        self._activity = "while its functions were imported"
        add_import_paths(job.paths)
        loss_fn = None if job.loss_fn is None else job.loss_fn.found()
        recipe = _load_recipe(job.recipe)
        inputs = self._inputs()
        batches = _JobBatches(job, self._report_step, self._check_batch)
        build = job.build.found()
        self._activity = f"while {job.build.name}() built the model"
        model = build()
        self._activity = "while the model was looked at"
        party = Participant(
            job.side,
            model,
            loss_fn,
            recipe,
            inputs=inputs,
            options=job.options,
            randomness=job.randomness,
        )
        text, optimizer = recipe_json(party.recipe)
        environment = party.environment()
        self._emit(messages.SideBuildEvent(side=job.side, environment=environment, recipe=text, optimizer=optimizer))
        meeting = None
        if job.number == 0:
            self._activity = "while its weights were written"
            weight_exchange.write_reference(party.inventory, folder)
            self._emit(messages.SideReadyEvent(side=job.side))
        else:
            self._activity = "while it was matched with the first side"
            source = weight_exchange.read_reference(folder)
            meeting, ways = party.align_with(source, job.names)
            weight_exchange.write_alignment(meeting.agreed[0], ways, Path(job.alignment_file(job.number)))
            batches.across = ChannelOrderAdapter(source, party.inventory)
            self._emit(messages.SideReadyEvent(side=job.side, agreed=meeting.agreed[0]))
        train = _read_message(self._commands, TrainCommand)
        if train is None:  # the run ended
            return
        self._activity = "in training"
        self._train(party, meeting or self._first(party, train), batches, train.phases)
        self._emit(messages.SideFinishEvent(side=job.side))

    def _inputs(self) -> Any:
        inputs = self._job.inputs
        if isinstance(inputs, FunctionRef):
            return inputs.found()()
        return None if inputs is None else load_batch(Path(self._job.arrays), inputs)

    def _first(self, party: Participant, train: TrainCommand) -> ParticipantAlignment:
        found = [weight_exchange.read_alignment(Path(self._job.alignment_file(number))) for number in train.others]
        return party.first([agreed for agreed, _ in found], [way for _, ways in found for way in ways])

    def _train(
        self, party: Participant, meeting: ParticipantAlignment, batches: _JobBatches, phases: list[Phase]
    ) -> None:
        for phase in phases:
            self._phase, self._step, self._loss = phase.shown, 0, None
            path = Path(self._job.traces) / f"{phase.name}.trace"
            self._steps = self._job.steps if party.recipe is not None else 1
            with _TraceFile(path, self._note_loss) as write:
                note, trace = "", None
                try:
                    trace = party.run(phase, meeting, batches, self._steps, write)
                except Exception as error:
                    if not phase.wide:
                        raise
                    note = without_judge(party.label, error)
            if trace is None:
                path.unlink()  # an unfinished float64 run is no reference
            self._emit(messages.PhaseEndEvent(side=party.label, trace=trace, note=note))

    def _note_loss(self, entry: Entry) -> None:
        if entry.what == "loss":
            self._loss = entry.number

    def _report_step(self, step: int) -> None:
        """Report that a step begins."""
        job, self._step = self._job, step + 1
        self._emit(
            messages.SideProgressEvent(
                side=job.side, phase=self._phase, step=step + 1, steps=self._steps, loss=self._loss
            )
        )

    def _check_batch(self, step: int, batch: Any) -> None:
        """Check that the user's function returns the same batch in every phase and on every side."""
        found = batch_digest(batch)
        if self._digests.setdefault(step, found) != found:
            raise RecipeError(
                f"data({step}) gave other arrays at its second call. It must give the same ones for the same step, so "
                "that every side is trained on them: seed it with the step, numpy.random.default_rng(step)."
            )
        self._emit(messages.BatchDigestEvent(side=self._job.side, step=step, digest=found))


class _JobBatches:
    """Batches of a side, by the number of the step, from 0."""

    def __init__(self, job: SideJob, begin: Callable[[int], None], check: Callable[[int, Any], None]) -> None:
        self._first, self._arrays = job.number == 0, Path(job.arrays)
        self._trees: list[BatchTree] = [] if isinstance(job.data, FunctionRef) else job.data
        self._batch_function = job.data.found() if isinstance(job.data, FunctionRef) else None
        self._report_step, self._check_batch = begin, check
        self.across: ChannelOrderAdapter | None = None

    def __call__(self, step: int) -> Any:
        self._report_step(step)
        if self._batch_function is not None:
            batch = self._batch_function(step)
            self._check_batch(step, batch)
        else:
            batch = load_batch(self._arrays, self._trees[step % len(self._trees)])
        if not isinstance(batch, Batch):
            return batch if self._first or self.across is None else self.across.tree(batch)
        if self._first or self.across is None:
            return batch.source
        return self.across.tree(batch.source) if batch.target is None else batch.target


class _TraceFile:
    """Trace file that also passes its entries to an observer."""

    def __init__(self, path: Path, note: Callable[[Entry], None]) -> None:
        self._writer, self._note_loss = TraceWriter(path), note

    def __enter__(self) -> Callable[[Entry], None]:
        return self._write

    def _write(self, entry: Entry) -> None:
        self._writer(entry)
        self._note_loss(entry)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._writer.close()


def _read_message(commands: IO[bytes], kind: type[_Struct]) -> _Struct | None:
    """Read the next message; None at the end of the input."""
    line = commands.readline()
    return msgspec.json.decode(line, type=kind) if line else None


def _load_recipe(recipe: str | FunctionRef | OwnLoopSpec | None) -> Any:
    """Return the side's recipe, as `Participant` takes it."""
    if isinstance(recipe, OwnLoopSpec):
        policy = Recipe.from_json(recipe.looked_at).policy
        return OwnLoop(recipe.begin.found(), recipe.step.found(), policy)
    if isinstance(recipe, str):
        return Recipe.from_json(recipe)
    return None if recipe is None else recipe.found()


def _is_missing_framework(error: BaseException) -> bool:
    """Return whether an error means that a framework is not installed."""
    if isinstance(error, BackendNotInstalledError):
        return True
    root = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return root in registry.entries()


def _error_text(error: BaseException, side: str) -> str:
    """Return an error's message and location, with a hint if there is one."""
    if isinstance(error, ModuleNotFoundError):
        known = registry.entries().get((error.name or "").partition(".")[0])
        run = "" if known is None else f" Run there: {registry.install_command(known)}."
        return (
            f"{error.name} is not installed in {sys.executable}.{run} For another environment, name its Python: "
            f"interpreters={{{side!r}: path}}, or --interpreter '{side}=PATH'."
        )
    if isinstance(error, SystemExit):
        return f"the code called sys.exit({error.code!r})\n{_traceback_tail(error)}"
    if isinstance(error, PolyampError):
        return str(error)
    return f"{_error_line(error)}\n{_traceback_tail(error)}"


def _error_line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[0].strip()


def _traceback_tail(error: BaseException) -> str:
    lines = "".join(traceback.format_tb(error.__traceback__)).splitlines()
    return "\n".join(lines[-_TRACEBACK_LINES:])


if __name__ == "__main__":
    main()

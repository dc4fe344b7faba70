"""`SideWorker`, base of the main program of a side's process, and `ParticipantWorker`, that of a comparison.

A worker reads a job, and later commands, from standard input, a JSON line each, and writes one event per line to
standard output. Output of the user's code goes to standard error. Any exception becomes the last event. Traces are
written to files, entry by entry.
"""

from __future__ import annotations

import platform
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from polyamp._version import __version__
from polyamp.contract import registry
from polyamp.errors import BackendNotInstalledError, PolyampError
from polyamp.parity.execution import exchange_files, worker_messages
from polyamp.parity.execution.batch_checks import RepeatCheck
from polyamp.parity.execution.function_ref import FunctionRef, add_import_paths
from polyamp.parity.execution.memory_mapped_arrays import BatchTree, load_batch
from polyamp.parity.execution.participant import Participant
from polyamp.parity.execution.trace_recorder import ParticipantAlignment, side_batch
from polyamp.parity.execution.worker_messages import OwnLoopSpec, SideJob, TrainCommand
from polyamp.parity.precisions import Phase, recipe_json
from polyamp.parity.report_data import Failure
from polyamp.parity.trace.trace import Entry
from polyamp.parity.trainers import OwnLoop
from polyamp.porting.check import ChannelOrderAdapter
from polyamp.porting.layouts.inventory import Inventory
from polyamp.recipe.recipe import Recipe
from polyamp.worker_processes import claim_stdio

EmitMessage = Callable[[Any], None]
ReceiveCommand = Callable[[type[Any]], Any]
_Job = TypeVar("_Job", bound=worker_messages.WorkerJob)
_TRACEBACK_LINES: Final = 12
"""Number of traceback lines in a message."""


class SideWorker(ABC, Generic[_Job]):
    """Execution of one side's job.

    Attributes:
        job: the job.
        emit: sends a message.
        receive: returns the next command of a type; None at the end of the input.
        activity: what it does, for the message of a failure; "" if that needs no introduction.
        phase, step: current phase and step.
    """

    def __init__(self, job: _Job, emit: EmitMessage, receive: ReceiveCommand) -> None:
        self.job, self.emit, self.receive = job, emit, receive
        self.activity = "before it began"
        self.phase, self.step = "", 0

    @classmethod
    def main(cls, job_type: type[_Job]) -> None:
        """Run the job from standard input."""
        channel = claim_stdio()
        channel.send(worker_messages.HandshakeEvent(polyamp=__version__, python=platform.python_version()))
        job = channel.receive(job_type)
        if job is not None:
            cls(job, channel.send, channel.receive).run_to_end()

    def run_to_end(self) -> None:
        """Run the whole job; an exception becomes the last event."""
        try:
            self.run_job()
        except BaseException as error:  # noqa: BLE001  # sys.exit() in the user's code must be reported too
            traceback.print_exc()
            text = _error_text(error, self.job.side)
            failure = self.failure(
                "missing" if _is_missing_framework(error) else "error",
                f"{self.activity}: {text}" if self.activity else text,
            )
            self.emit(worker_messages.SideFailureEvent(failure=failure))

    def failure(self, reason: worker_messages.FailureReason, message: str) -> Failure:
        """Return a failure in the current phase and step."""
        return Failure(side=self.job.side, phase=self.phase, step=self.step, reason=reason, message=message)

    @abstractmethod
    def run_job(self) -> None:
        """Run the job."""


def _is_missing_framework(error: BaseException) -> bool:
    """Return whether an error means that a framework is not installed."""
    if isinstance(error, BackendNotInstalledError):
        return True
    root = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return root in registry.entries()


def _error_text(error: BaseException, side: str) -> str:
    """Return an error's message and location, with a hint if there is one."""
    if isinstance(error, ModuleNotFoundError):
        known, root = registry.entries(), (error.name or "").partition(".")[0]
        entry = known.own.get(root) or known.choices.get(root)
        run = "" if entry is None else f" Run there: {registry.install_command(entry)}."
        return (
            f"{error.name} is not installed in {sys.executable}.{run} For another environment, name its Python: "
            f"interpreters={{{side!r}: path}}, or --interpreter '{side}=PATH'."
        )
    if isinstance(error, PolyampError):
        return str(error)
    line = traceback.format_exception_only(error)[0].strip()
    if isinstance(error, SystemExit):
        line = f"the code called sys.exit({error.code!r})"
    stack = "".join(traceback.format_tb(error.__traceback__)).splitlines()
    return "\n".join([line, *stack[-_TRACEBACK_LINES:]])


class ParticipantWorker(SideWorker[SideJob]):
    """Worker that builds a participant, aligns it with the first side and trains it in every phase."""

    def __init__(self, job: SideJob, emit: EmitMessage, receive: ReceiveCommand) -> None:
        super().__init__(job, emit, receive)
        self._steps = 1
        self._loss: float | None = None
        self._repeats = RepeatCheck("data")

    def run_job(self) -> None:
        """Build the model, align it, and train on command."""
        job = self.job
        folder = Path(job.folder)
        self.activity = "while its functions were imported"
        add_import_paths(job.paths)
        loss_fn = None if job.loss_fn is None else job.loss_fn.load()
        recipe = _load_recipe(job.recipe)
        inputs = self._inputs()
        batches = _JobBatches(job, self._report_step, self._check_batch)
        build = job.build.load()
        self.activity = f"while {job.build.name}() built the model"
        model = build()
        self.activity = "while the model was looked at"
        participant = Participant(
            job.side,
            model,
            loss_fn,
            recipe,
            inputs=inputs,
            options=job.options,
            randomness=job.randomness,
        )
        text, optimizer = recipe_json(participant.recipe)
        environment = participant.environment()
        self.emit(
            worker_messages.SideBuildEvent(
                side=job.side,
                environment=environment,
                recipe=text,
                optimizer=optimizer,
                records_operations=participant.records_operations,
            )
        )
        alignment = None
        if job.number == 0:
            self.activity = "while its weights were written"
            exchange_files.write_reference(participant.inventory, folder)
            if participant.may_flatten:
                self.activity = "while it ran its first pass"
                first_pass = participant.first_pass(batches.without_progress)
                exchange_files.write_object(folder / exchange_files.FIRST_INPUTS_FILE, first_pass)
            self.emit(worker_messages.SideReadyEvent(side=job.side))
        else:
            self.activity = "while it was matched with the first side"
            source: Inventory = exchange_files.read_object(folder / exchange_files.REFERENCE_FILE)
            batches.adapter = ChannelOrderAdapter(source, participant.inventory)
            alignment, mappings = participant.align_with(
                source,
                job.names,
                job.rows,
                lambda: exchange_files.read_object(folder / exchange_files.FIRST_INPUTS_FILE),
                batches.without_progress,
            )
            exchange_files.write_object(Path(job.alignment_file(job.number)), (alignment.alignments[0], mappings))
            self.emit(worker_messages.SideReadyEvent(side=job.side, alignment=alignment.alignments[0]))
        command: TrainCommand | None = self.receive(TrainCommand)
        if command is None:  # the run ended
            return
        alignment = alignment or self._align_as_first(participant, command)
        if job.operations is None:
            self.activity = "in training"
            self._train(participant, alignment, batches, command.phases)
        else:
            self.activity = "while its operations were recorded"
            phase, location = job.operations.phase, job.operations.locations[job.side]
            log = participant.record_operations(phase, alignment, batches.without_progress, location)
            exchange_files.write_object(Path(job.operations_file), log)
        self.emit(worker_messages.SideFinishEvent(side=job.side))

    def _inputs(self) -> Any:
        inputs = self.job.inputs
        if isinstance(inputs, FunctionRef):
            return inputs.load()()
        return None if inputs is None else load_batch(Path(self.job.arrays), inputs)

    def _align_as_first(self, participant: Participant, command: TrainCommand) -> ParticipantAlignment:
        found = [exchange_files.read_object(Path(self.job.alignment_file(number))) for number in command.others]
        mappings = [mapping for _, chosen in found for mapping in chosen]
        return participant.align_as_first([alignment for alignment, _ in found], mappings)

    def _train(
        self, participant: Participant, alignment: ParticipantAlignment, batches: _JobBatches, phases: list[Phase]
    ) -> None:
        for phase in phases:
            self.phase, self.step, self._loss = phase.title, 0, None
            path = Path(self.job.traces) / f"{phase.name}.trace"
            self._steps = self.job.steps if participant.recipe is not None else 1
            trace, note = participant.record(phase, alignment, batches, self._steps, path, self._note_loss)
            self.emit(worker_messages.PhaseEndEvent(side=self.job.side, trace=trace, note=note))

    def _note_loss(self, entry: Entry) -> None:
        if entry.what == "loss":
            self._loss = entry.number

    def _report_step(self, step: int) -> None:
        """Report that a step begins."""
        job, self.step = self.job, step + 1
        event = worker_messages.SideProgressEvent(
            side=job.side, phase=self.phase, step=step + 1, steps=self._steps, loss=self._loss
        )
        self.emit(event)

    def _check_batch(self, step: int, batch: Any) -> None:
        """Check that the user's function returns the same batch in every phase and on every side."""
        found = self._repeats.check(step, batch)
        self.emit(worker_messages.BatchDigestEvent(side=self.job.side, step=step, digest=found))


class _JobBatches:
    """Batches of a side, by the number of the step, from 0."""

    def __init__(self, job: SideJob, begin: Callable[[int], None], check: Callable[[int, Any], None]) -> None:
        self._arrays = Path(job.arrays)
        self._trees: list[BatchTree] = [] if isinstance(job.data, FunctionRef) else job.data
        self._batch_function = job.data.load() if isinstance(job.data, FunctionRef) else None
        self._report_step, self._check_batch = begin, check
        self.adapter: ChannelOrderAdapter | None = None

    def __call__(self, step: int) -> Any:
        self._report_step(step)
        batch = self._batch(step)
        if self._batch_function is not None:
            self._check_batch(step, batch)
        return side_batch(batch, self.adapter)

    def without_progress(self, step: int) -> Any:
        """Return a batch before training begins."""
        return side_batch(self._batch(step), self.adapter)

    def _batch(self, step: int) -> Any:
        if self._batch_function is not None:
            return self._batch_function(step)
        return load_batch(self._arrays, self._trees[step % len(self._trees)])


def _load_recipe(recipe: str | FunctionRef | OwnLoopSpec | None) -> Any:
    """Return the side's recipe, as `Participant` takes it."""
    if isinstance(recipe, OwnLoopSpec):
        policy = Recipe.from_json(recipe.recipe).policy
        return OwnLoop(recipe.begin.load(), recipe.step.load(), policy)
    if isinstance(recipe, str):
        return Recipe.from_json(recipe)
    return None if recipe is None else recipe.load()


if __name__ == "__main__":
    ParticipantWorker.main(SideJob)

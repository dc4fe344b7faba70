"""Main program of a side's worker process in a comparison. It writes its traces to files, entry by entry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from polyamp.errors import RecipeError
from polyamp.parity.execution import messages, weight_exchange
from polyamp.parity.execution.array_store import BatchTree, batch_digest, load_batch
from polyamp.parity.execution.function_ref import FunctionRef, add_import_paths
from polyamp.parity.execution.messages import OwnLoopSpec, SideJob, TrainCommand
from polyamp.parity.execution.participant import Participant
from polyamp.parity.execution.recorder import ParticipantAlignment
from polyamp.parity.execution.side_worker import EmitMessage, SideWorker
from polyamp.parity.own_loop import OwnLoop
from polyamp.parity.precisions import Phase, recipe_json, without_judge
from polyamp.parity.trace.trace import Entry, TraceWriter
from polyamp.porting.check import Batch, ChannelOrderAdapter
from polyamp.recipe.recipe import Recipe


class ParticipantWorker(SideWorker[SideJob]):
    """Worker that builds a participant, aligns it with the first side and trains it in every phase."""

    def __init__(self, job: SideJob, emit: EmitMessage, commands: IO[bytes]) -> None:
        super().__init__(job, emit, commands)
        self._steps = 1
        self._loss: float | None = None
        self._digests: dict[int, str] = {}

    def run_job(self) -> None:
        """Build the model, align it, and train on command."""
        job = self.job
        folder = Path(job.folder)
        self.activity = "while its functions were imported"
        add_import_paths(job.paths)
        loss_fn = None if job.loss_fn is None else job.loss_fn.found()
        recipe = _load_recipe(job.recipe)
        inputs = self._inputs()
        batches = _JobBatches(job, self._report_step, self._check_batch)
        build = job.build.found()
        self.activity = f"while {job.build.name}() built the model"
        model = build()
        self.activity = "while the model was looked at"
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
        self.emit(messages.SideBuildEvent(side=job.side, environment=environment, recipe=text, optimizer=optimizer))
        meeting = None
        if job.number == 0:
            self.activity = "while its weights were written"
            weight_exchange.write_reference(party.inventory, folder)
            self.emit(messages.SideReadyEvent(side=job.side))
        else:
            self.activity = "while it was matched with the first side"
            source = weight_exchange.read_reference(folder)
            meeting, ways = party.align_with(source, job.names)
            weight_exchange.write_alignment(meeting.agreed[0], ways, Path(job.alignment_file(job.number)))
            batches.across = ChannelOrderAdapter(source, party.inventory)
            self.emit(messages.SideReadyEvent(side=job.side, agreed=meeting.agreed[0]))
        train = self.next_command(TrainCommand)
        if train is None:  # the run ended
            return
        self.activity = "in training"
        self._train(party, meeting or self._first(party, train), batches, train.phases)
        self.emit(messages.SideFinishEvent(side=job.side))

    def _inputs(self) -> Any:
        inputs = self.job.inputs
        if isinstance(inputs, FunctionRef):
            return inputs.found()()
        return None if inputs is None else load_batch(Path(self.job.arrays), inputs)

    def _first(self, party: Participant, train: TrainCommand) -> ParticipantAlignment:
        found = [weight_exchange.read_alignment(Path(self.job.alignment_file(number))) for number in train.others]
        return party.first([agreed for agreed, _ in found], [way for _, ways in found for way in ways])

    def _train(
        self, party: Participant, meeting: ParticipantAlignment, batches: _JobBatches, phases: list[Phase]
    ) -> None:
        for phase in phases:
            self.phase, self.step, self._loss = phase.shown, 0, None
            path = Path(self.job.traces) / f"{phase.name}.trace"
            self._steps = self.job.steps if party.recipe is not None else 1
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
            self.emit(messages.PhaseEndEvent(side=party.label, trace=trace, note=note))

    def _note_loss(self, entry: Entry) -> None:
        if entry.what == "loss":
            self._loss = entry.number

    def _report_step(self, step: int) -> None:
        """Report that a step begins."""
        job, self.step = self.job, step + 1
        event = messages.SideProgressEvent(
            side=job.side, phase=self.phase, step=step + 1, steps=self._steps, loss=self._loss
        )
        self.emit(event)

    def _check_batch(self, step: int, batch: Any) -> None:
        """Check that the user's function returns the same batch in every phase and on every side."""
        found = batch_digest(batch)
        if self._digests.setdefault(step, found) != found:
            raise RecipeError(
                f"data({step}) gave other arrays at its second call. It must give the same ones for the same step, so "
                "that every side is trained on them: seed it with the step, numpy.random.default_rng(step)."
            )
        self.emit(messages.BatchDigestEvent(side=self.job.side, step=step, digest=found))


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


def _load_recipe(recipe: str | FunctionRef | OwnLoopSpec | None) -> Any:
    """Return the side's recipe, as `Participant` takes it."""
    if isinstance(recipe, OwnLoopSpec):
        policy = Recipe.from_json(recipe.looked_at).policy
        return OwnLoop(recipe.begin.found(), recipe.step.found(), policy)
    if isinstance(recipe, str):
        return Recipe.from_json(recipe)
    return None if recipe is None else recipe.found()


if __name__ == "__main__":
    ParticipantWorker.main(SideJob)

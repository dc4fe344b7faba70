"""Main program of a side's worker process in a comparison. It writes its traces to files, entry by entry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from polyamp.errors import RecipeError
from polyamp.parity.execution import messages, weight_exchange
from polyamp.parity.execution.array_store import BatchTree, batch_digest, load_batch
from polyamp.parity.execution.function_ref import FunctionRef, add_import_paths
from polyamp.parity.execution.messages import OwnLoopSpec, SideJob, TrainCommand
from polyamp.parity.execution.participant import Participant
from polyamp.parity.execution.recorder import ParticipantAlignment, side_batch
from polyamp.parity.execution.side_worker import EmitMessage, SideWorker
from polyamp.parity.own_loop import OwnLoop
from polyamp.parity.precisions import Phase, recipe_json
from polyamp.parity.trace.trace import Entry
from polyamp.porting.check import ChannelOrderAdapter
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
        self.emit(messages.SideBuildEvent(side=job.side, environment=environment, recipe=text, optimizer=optimizer))
        alignment = None
        if job.number == 0:
            self.activity = "while its weights were written"
            weight_exchange.write_reference(participant.inventory, folder)
            self.emit(messages.SideReadyEvent(side=job.side))
        else:
            self.activity = "while it was matched with the first side"
            source = weight_exchange.read_reference(folder)
            alignment, mappings = participant.align_with(source, job.names)
            weight_exchange.write_alignment(alignment.alignments[0], mappings, Path(job.alignment_file(job.number)))
            batches.adapter = ChannelOrderAdapter(source, participant.inventory)
            self.emit(messages.SideReadyEvent(side=job.side, alignment=alignment.alignments[0]))
        command = self.next_command(TrainCommand)
        if command is None:  # the run ended
            return
        self.activity = "in training"
        self._train(participant, alignment or self._align_as_first(participant, command), batches, command.phases)
        self.emit(messages.SideFinishEvent(side=job.side))

    def _inputs(self) -> Any:
        inputs = self.job.inputs
        if isinstance(inputs, FunctionRef):
            return inputs.load()()
        return None if inputs is None else load_batch(Path(self.job.arrays), inputs)

    def _align_as_first(self, participant: Participant, command: TrainCommand) -> ParticipantAlignment:
        found = [weight_exchange.read_alignment(Path(self.job.alignment_file(number))) for number in command.others]
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
            self.emit(messages.PhaseEndEvent(side=self.job.side, trace=trace, note=note))

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
        self._arrays = Path(job.arrays)
        self._trees: list[BatchTree] = [] if isinstance(job.data, FunctionRef) else job.data
        self._batch_function = job.data.load() if isinstance(job.data, FunctionRef) else None
        self._report_step, self._check_batch = begin, check
        self.adapter: ChannelOrderAdapter | None = None

    def __call__(self, step: int) -> Any:
        self._report_step(step)
        if self._batch_function is not None:
            batch = self._batch_function(step)
            self._check_batch(step, batch)
        else:
            batch = load_batch(self._arrays, self._trees[step % len(self._trees)])
        return side_batch(batch, self.adapter)


def _load_recipe(recipe: str | FunctionRef | OwnLoopSpec | None) -> Any:
    """Return the side's recipe, as `Participant` takes it."""
    if isinstance(recipe, OwnLoopSpec):
        policy = Recipe.from_json(recipe.looked_at).policy
        return OwnLoop(recipe.begin.load(), recipe.step.load(), policy)
    if isinstance(recipe, str):
        return Recipe.from_json(recipe)
    return None if recipe is None else recipe.load()


if __name__ == "__main__":
    ParticipantWorker.main(SideJob)

"""The process of one side; started by `polyamp.parity.processes`, one for each.

It reads a `Job` and later `Train` from standard input, a JSON line each, and writes one event per line to standard
output. What the user's code prints goes to standard error. Traces go to files, entry by entry.
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
from polyamp.parity import exchange, jobs
from polyamp.parity.compare import without_judge
from polyamp.parity.findings import Failure
from polyamp.parity.jobs import Job, Loop, Said, Train
from polyamp.parity.named import Named, look_in
from polyamp.parity.own_loop import OwnLoop
from polyamp.parity.party import Party
from polyamp.parity.phases import Phase, plain
from polyamp.parity.running import Meeting
from polyamp.parity.stored import Tree, digest, tree_of
from polyamp.parity.trace import Entry, Writer
from polyamp.porting.check import Across, Batch
from polyamp.recipe.recipe import Recipe
from polyamp.workers import claimed

Emit = Callable[[Said], None]
_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_LINES: Final = 12
"""So many lines of a traceback are in a message."""


def main() -> None:
    """Do the job on standard input."""
    channel = claimed()

    def emit(event: Said) -> None:
        channel.lines.write(msgspec.json.encode(event).decode() + "\n")
        channel.lines.flush()

    emit(jobs.Hello(polyamp=__version__, python=platform.python_version()))
    job = _read(channel.commands, Job)
    if job is not None:
        _Work(job, emit, channel.commands).to_its_end()


class _Work:
    """One side's way through its job, and where it is on it."""

    def __init__(self, job: Job, emit: Emit, commands: IO[bytes]) -> None:
        self._job, self._emit, self._commands = job, emit, commands
        self._doing = "before it began"
        self._phase, self._step = "", 0
        self._steps = 1
        self._loss: float | None = None
        self._digests: dict[int, str] = {}

    def to_its_end(self) -> None:
        """All of it; what is raised becomes the last event."""
        try:
            self._all()
        except BaseException as error:  # noqa: BLE001  # sys.exit() in the user's code, too, is something to tell
            traceback.print_exc()
            failure = Failure(
                side=self._job.side,
                phase=self._phase,
                step=self._step,
                reason="missing" if _is_missing(error) else "error",
                message=f"{self._doing}: {_said(error, self._job.side)}",
            )
            self._emit(jobs.Failed(failure=failure))

    def _all(self) -> None:
        job = self._job
        folder = Path(job.folder)
        self._doing = "while its functions were imported"
        look_in(job.paths)
        loss_fn = None if job.loss_fn is None else job.loss_fn.found()
        recipe = _recipe(job.recipe)
        inputs = self._inputs()
        batches = _Batches(job, self._begin, self._check)
        build = job.build.found()
        self._doing = f"while {job.build.name}() built the model"
        model = build()
        self._doing = "while the model was looked at"
        party = Party(
            job.side,
            model,
            loss_fn,
            recipe,
            inputs=inputs,
            options=job.options,
            randomness=job.randomness,
        )
        text, optimizer = plain(party.recipe)
        environment = party.environment()
        self._emit(jobs.Started(side=job.side, environment=environment, recipe=text, optimizer=optimizer))
        meeting = None
        if job.number == 0:
            self._doing = "while its weights were written"
            exchange.offer(party.inventory, folder)
            self._emit(jobs.Ready(side=job.side))
        else:
            self._doing = "while it was matched with the first side"
            source = exchange.offered(folder)
            meeting, ways = party.meet(source, job.names)
            exchange.answer(meeting.agreed[0], ways, Path(job.answer(job.number)))
            batches.across = Across(source, party.inventory)
            self._emit(jobs.Ready(side=job.side, agreed=meeting.agreed[0]))
        train = _read(self._commands, Train)
        if train is None:  # the run ended
            return
        self._doing = "in training"
        self._train(party, meeting or self._first(party, train), batches, train.phases)
        self._emit(jobs.Finished(side=job.side))

    def _inputs(self) -> Any:
        inputs = self._job.inputs
        if isinstance(inputs, Named):
            return inputs.found()()
        return None if inputs is None else tree_of(Path(self._job.arrays), inputs)

    def _first(self, party: Party, train: Train) -> Meeting:
        found = [exchange.answered(Path(self._job.answer(number))) for number in train.others]
        return party.first([agreed for agreed, _ in found], [way for _, ways in found for way in ways])

    def _train(self, party: Party, meeting: Meeting, batches: _Batches, phases: list[Phase]) -> None:
        for phase in phases:
            self._phase, self._step, self._loss = phase.shown, 0, None
            path = Path(self._job.traces) / f"{phase.name}.trace"
            self._steps = self._job.steps if party.recipe is not None else 1
            with _Writing(path, self._note) as write:
                note, trace = "", None
                try:
                    trace = party.run(phase, meeting, batches, self._steps, write)
                except Exception as error:
                    if not phase.wide:
                        raise
                    note = without_judge(party.label, error)
            if trace is None:
                path.unlink()  # a judge that came half the way judges nothing
            self._emit(jobs.Ended(side=party.label, trace=trace, note=note))

    def _note(self, entry: Entry) -> None:
        if entry.what == "loss":
            self._loss = entry.number

    def _begin(self, step: int) -> None:
        """A step is about to begin."""
        job, self._step = self._job, step + 1
        self._emit(jobs.Progress(side=job.side, phase=self._phase, step=step + 1, steps=self._steps, loss=self._loss))

    def _check(self, step: int, batch: Any) -> None:
        """A batch that the user's function gave must be the same in every phase, and on every side."""
        found = digest(batch)
        if self._digests.setdefault(step, found) != found:
            raise RecipeError(
                f"data({step}) gave other arrays at its second call. It must give the same ones for the same step, so "
                "that every side is trained on them: seed it with the step, numpy.random.default_rng(step)."
            )
        self._emit(jobs.Given(side=self._job.side, step=step, digest=found))


class _Batches:
    """The batches of a side, by the number of the step, from 0."""

    def __init__(self, job: Job, begin: Callable[[int], None], check: Callable[[int, Any], None]) -> None:
        self._first, self._arrays = job.number == 0, Path(job.arrays)
        self._trees: list[Tree] = [] if isinstance(job.data, Named) else job.data
        self._made = job.data.found() if isinstance(job.data, Named) else None
        self._begin, self._check = begin, check
        self.across: Across | None = None

    def __call__(self, step: int) -> Any:
        self._begin(step)
        if self._made is not None:
            batch = self._made(step)
            self._check(step, batch)
        else:
            batch = tree_of(self._arrays, self._trees[step % len(self._trees)])
        if not isinstance(batch, Batch):
            return batch if self._first or self.across is None else self.across.tree(batch)
        if self._first or self.across is None:
            return batch.source
        return self.across.tree(batch.source) if batch.target is None else batch.target


class _Writing:
    """A trace's file, and what else wants to see its entries."""

    def __init__(self, path: Path, note: Callable[[Entry], None]) -> None:
        self._writer, self._note = Writer(path), note

    def __enter__(self) -> Callable[[Entry], None]:
        return self._write

    def _write(self, entry: Entry) -> None:
        self._writer(entry)
        self._note(entry)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._writer.close()


def _read(commands: IO[bytes], kind: type[_Struct]) -> _Struct | None:
    """The next line; None if there will be none."""
    line = commands.readline()
    return msgspec.json.decode(line, type=kind) if line else None


def _recipe(recipe: str | Named | Loop | None) -> Any:
    """What the side trains with, as `Party` takes it."""
    if isinstance(recipe, Loop):
        policy = Recipe.from_json(recipe.looked_at).policy
        return OwnLoop(recipe.begin.found(), recipe.step.found(), policy)
    if isinstance(recipe, str):
        return Recipe.from_json(recipe)
    return None if recipe is None else recipe.found()


def _is_missing(error: BaseException) -> bool:
    """Whether a framework is not installed here."""
    if isinstance(error, BackendNotInstalledError):
        return True
    root = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return root in registry.entries()


def _said(error: BaseException, side: str) -> str:
    """What was raised, where, and what to do if that is known."""
    if isinstance(error, ModuleNotFoundError):
        known = registry.entries().get((error.name or "").partition(".")[0])
        run = "" if known is None else f" Run there: {registry.install_command(known)}."
        return (
            f"{error.name} is not installed in {sys.executable}.{run} For another environment, name its Python: "
            f"interpreters={{{side!r}: path}}, or --interpreter '{side}=PATH'."
        )
    if isinstance(error, SystemExit):
        return f"the code called sys.exit({error.code!r})\n{_stack(error)}"
    if isinstance(error, PolyampError):
        return str(error)
    return f"{_first_line(error)}\n{_stack(error)}"


def _first_line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[0].strip()


def _stack(error: BaseException) -> str:
    lines = "".join(traceback.format_tb(error.__traceback__)).splitlines()
    return "\n".join(lines[-_LINES:])


if __name__ == "__main__":
    main()

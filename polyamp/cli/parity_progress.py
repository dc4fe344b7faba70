"""Progress of `polyamp parity FILE.py`: a bar per side and phase on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskID

from polyamp.cli.progress import shown
from polyamp.parity.jobs import Event, Failed, Finished, Started, Starting
from polyamp.parity.jobs import Progress as Step

OnEvent = Callable[[Event], None]


def show_progress(console: Console) -> AbstractContextManager[OnEvent]:
    """A function that shows a comparison's events, for as long as the block lasts."""
    return shown(console, _Lines, _Bars)


class _Lines:
    """About four lines for each side and phase."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __call__(self, event: Event) -> None:
        text = _remark(event)
        if isinstance(event, Step):
            quarters = [4 * step // event.steps for step in (event.step - 1, event.step)]
            if event.step == 1 or quarters[0] != quarters[1]:
                text = f"{escape(event.side)}, {escape(event.phase)}: step {event.step} of {event.steps}{_loss(event)}"
        if text:
            self._console.print(text, soft_wrap=True)


class _Bars:
    """One bar for each side and phase, and one for each side that builds."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[tuple[str, str], TaskID] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, Starting):
            self._tasks[event.side, ""] = self._bars.add_task(f"{escape(event.side)}: building", total=None, at="")
            return
        side = event.failure.side if isinstance(event, Failed) else event.side
        if (building := self._tasks.pop((side, ""), None)) is not None:
            self._bars.remove_task(building)
        if isinstance(event, Step):
            self._step(event)
        elif isinstance(event, Finished):
            for (label, _), task in self._tasks.items():
                if label == side:
                    self._bars.update(task, completed=self._bars.tasks[self._bars.task_ids.index(task)].total)
        if text := _remark(event):
            self._bars.console.print(text, soft_wrap=True)

    def _step(self, event: Step) -> None:
        key = event.side, event.phase
        if key not in self._tasks:
            label = f"{escape(event.side)} {escape(event.phase)}"
            self._tasks[key] = self._bars.add_task(label, total=event.steps, at="")
        self._bars.update(self._tasks[key], completed=event.step, at=_loss(event))


def _remark(event: Event) -> str:
    """What is said of an event in a line that stays; "" where a bar is enough."""
    if isinstance(event, Started):
        place = event.environment
        versions = ", ".join(f"{name} {each}" for name, each in place.versions.items() if name != "polyamp")
        where = f"{versions} on {place.device}, {place.parameters:,} parameters"
        return f"{escape(event.side)}: {escape(place.model)}, {escape(where)}"
    if isinstance(event, Failed):
        failure = event.failure
        at = f" in step {failure.step} under {failure.phase}" if failure.phase else ""
        return f"[red]{escape(failure.side)} failed{escape(at)}: {failure.reason}[/]"
    return ""


def _loss(event: Step) -> str:
    return "" if event.loss is None else f"   loss {event.loss:.4g}"

"""Progress of a run of several processes: bars on a terminal (`shown`), plain lines elsewhere; and the demo's, one bar
per framework and policy. Called by the commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from polyamp.cli.tables import power_of_two
from polyamp.demo.runner import Event, Failed, Finished, Missing, OnEvent, Progress, Started, Starting

_EventT = TypeVar("_EventT")


def show_progress(console: Console) -> AbstractContextManager[OnEvent]:
    """A function that shows the demo's events, for as long as the block lasts."""
    return shown(console, _Lines, _Bars)


@contextmanager
def shown(
    console: Console,
    lines: Callable[[Console], Callable[[_EventT], None]],
    bars: Callable[[Bars], Callable[[_EventT], None]],
) -> Iterator[Callable[[_EventT], None]]:
    """A function that shows the events it is given, for as long as the block lasts.

    Args:
        console: where.
        lines: makes the one that prints lines, where there is no terminal.
        bars: makes the one that moves bars, each with a description and the field "at".
    """
    if not console.is_terminal:
        yield lines(console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[at]}"),
    )
    with Bars(*columns, console=console) as screen:
        yield bars(screen)


class _Lines:
    """About four lines for each framework and policy."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._quarter = 0

    def __call__(self, event: Event) -> None:
        text = None
        if isinstance(event, Starting):
            text = f"{event.backend}: starting"
        elif isinstance(event, Started):
            self._quarter = 0
            text = f"{event.backend} {event.version} on {event.device}"
        elif isinstance(event, Progress):
            quarter = 4 * event.step // event.steps
            if quarter != self._quarter:
                text = f"  {event.policy:<15} step {event.step:>4} of {event.steps}   {_standing(event)}"
            self._quarter = quarter % 4
        else:
            text = _ending(event)
        if text is not None:
            self._console.print(text, soft_wrap=True)


class _Bars:
    """One bar for each framework and policy."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._starting: TaskID | None = None

    def __call__(self, event: Event) -> None:
        if self._starting is not None:
            self._bars.remove_task(self._starting)
            self._starting = None
        if isinstance(event, Starting):
            self._starting = self._bars.add_task(f"{event.backend}: starting", total=None, at="")
        elif isinstance(event, Started):
            self._bars.console.print(f"[bold]{event.backend}[/] {event.version} on {event.device}")
        elif isinstance(event, Progress):
            key = event.backend, event.policy
            if key not in self._tasks:
                label = f"{event.backend} {escape(event.policy)}"
                self._tasks[key] = self._bars.add_task(label, total=event.steps, at="")
            self._bars.update(self._tasks[key], completed=event.step, at=_standing(event))
        else:
            text = _ending(event)
            if text is not None:
                self._bars.console.print(text, soft_wrap=True)


def _standing(event: Progress) -> str:
    loss = "not finite" if event.loss is None else f"{event.loss:.4f}"
    scaling = f"   scale {power_of_two(event.scale)}   skipped {event.skipped}" if event.scale != 1.0 else ""
    return f"loss {loss}{scaling}"


def _ending(event: Missing | Failed | Finished) -> str | None:
    if isinstance(event, Missing):
        return f"[yellow]{event.backend} left out: not installed[/]"
    if isinstance(event, Failed):
        where = " ".join(filter(None, (event.failure.backend, event.failure.policy)))
        return f"[red]{escape(where)} failed[/]"
    return None

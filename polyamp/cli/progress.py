"""Progress display of multi-process runs: bars on a terminal, plain lines elsewhere (`event_display`).

`show_progress` is the demo's, with one bar per framework and policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from polyamp.cli.tables import power_of_two
from polyamp.demo.runner import (
    DemoEvent,
    FrameworkFailureEvent,
    FrameworkLaunchEvent,
    FrameworkMissingEvent,
    FrameworkStartEvent,
    OnEvent,
    PolicyProgressEvent,
    PolicyResultEvent,
)

_EventT = TypeVar("_EventT")


def show_progress(console: Console) -> AbstractContextManager[OnEvent]:
    """Return a context manager that yields a function to show the demo's events."""
    return event_display(console, _FrameworkLines, _FrameworkBars)


@contextmanager
def event_display(
    console: Console,
    lines: Callable[[Console], Callable[[_EventT], None]],
    bars: Callable[[Bars], Callable[[_EventT], None]],
) -> Iterator[Callable[[_EventT], None]]:
    """Return a context manager that yields a function to show events.

    Args:
        console: the console.
        lines: makes a printer of lines, for output that is not a terminal.
        bars: makes a display of bars, each with a description and the field "at".
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


class _FrameworkLines:
    """Printer of about four lines for each framework and policy."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._quarter = 0

    def __call__(self, event: DemoEvent) -> None:
        text = None
        if isinstance(event, FrameworkLaunchEvent):
            text = f"{event.backend}: starting"
        elif isinstance(event, FrameworkStartEvent):
            self._quarter = 0
            text = f"{event.backend} {event.version} on {event.device}"
        elif isinstance(event, PolicyProgressEvent):
            quarter = 4 * event.step // event.steps
            if quarter != self._quarter:
                text = f"  {event.policy:<15} step {event.step:>4} of {event.steps}   {_progress_text(event)}"
            self._quarter = quarter % 4
        else:
            text = _event_text(event)
        if text is not None:
            self._console.print(text, soft_wrap=True)


class _FrameworkBars:
    """Progress bars: one for each framework and policy."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._starting: TaskID | None = None

    def __call__(self, event: DemoEvent) -> None:
        if self._starting is not None:
            self._bars.remove_task(self._starting)
            self._starting = None
        if isinstance(event, FrameworkLaunchEvent):
            self._starting = self._bars.add_task(f"{event.backend}: starting", total=None, at="")
        elif isinstance(event, FrameworkStartEvent):
            self._bars.console.print(f"[bold]{event.backend}[/] {event.version} on {event.device}")
        elif isinstance(event, PolicyProgressEvent):
            key = event.backend, event.policy
            if key not in self._tasks:
                label = f"{event.backend} {escape(event.policy)}"
                self._tasks[key] = self._bars.add_task(label, total=event.steps, at="")
            self._bars.update(self._tasks[key], completed=event.step, at=_progress_text(event))
        else:
            text = _event_text(event)
            if text is not None:
                self._bars.console.print(text, soft_wrap=True)


def _progress_text(event: PolicyProgressEvent) -> str:
    loss = "not finite" if event.loss is None else f"{event.loss:.4f}"
    scaling = f"   scale {power_of_two(event.scale)}   skipped {event.skipped}" if event.scale != 1.0 else ""
    return f"loss {loss}{scaling}"


def _event_text(event: FrameworkMissingEvent | FrameworkFailureEvent | PolicyResultEvent) -> str | None:
    if isinstance(event, FrameworkMissingEvent):
        return f"[yellow]{event.backend} left out: not installed[/]"
    if isinstance(event, FrameworkFailureEvent):
        where = " ".join(filter(None, (event.failure.backend, event.failure.policy)))
        return f"[red]{escape(where)} failed[/]"
    return None

"""Progress display of runs with several processes: a bar per side and phase on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from polyamp.cli.tables import power_of_two
from polyamp.parity.execution.worker_messages import (
    ParityEvent,
    SideBuildEvent,
    SideFailureEvent,
    SideFinishEvent,
    SideLaunchEvent,
    SideProgressEvent,
)

OnEvent = Callable[[ParityEvent], None]


@contextmanager
def show_progress(console: Console) -> Iterator[OnEvent]:
    """Return a context manager that yields a function to show a run's events."""
    if not console.is_terminal:
        yield _SideLines(console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[metrics]}"),
    )
    with Progress(*columns, console=console) as bars:
        yield _SideBars(bars)


class _SideLines:
    """Printer of about four lines for each side and phase."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __call__(self, event: ParityEvent) -> None:
        text = _event_text(event)
        if isinstance(event, SideProgressEvent):
            quarters = [4 * step // event.steps for step in (event.step - 1, event.step)]
            if event.step == 1 or quarters[0] != quarters[1]:
                where = f"{event.side}, {event.phase}"
                text = f"{escape(where)}: step {event.step} of {event.steps}{_metrics_text(event)}"
        if text:
            self._console.print(text, soft_wrap=True)


class _SideBars:
    """Progress bars: one for each side and phase, and one for each side that builds its model."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[tuple[str, str], TaskID] = {}

    def __call__(self, event: ParityEvent) -> None:
        if isinstance(event, SideLaunchEvent):
            self._tasks[event.side, ""] = self._bars.add_task(f"{escape(event.side)}: building", total=None, metrics="")
            return
        side = event.failure.side if isinstance(event, SideFailureEvent) else event.side
        if (building := self._tasks.pop((side, ""), None)) is not None:
            self._bars.remove_task(building)
        if isinstance(event, SideProgressEvent):
            self._show_step(event)
        elif isinstance(event, SideFinishEvent):
            for (label, _), task in self._tasks.items():
                if label == side:
                    self._bars.update(task, completed=self._bars.tasks[self._bars.task_ids.index(task)].total)
        if text := _event_text(event):
            self._bars.console.print(text, soft_wrap=True)

    def _show_step(self, event: SideProgressEvent) -> None:
        key = event.side, event.phase
        if key not in self._tasks:
            label = f"{escape(event.side)} {escape(event.phase)}"
            self._tasks[key] = self._bars.add_task(label, total=event.steps, metrics="")
        self._bars.update(self._tasks[key], completed=event.step, metrics=_metrics_text(event))


def _event_text(event: ParityEvent) -> str:
    """Return the permanent line for an event; "" if a bar is enough."""
    if isinstance(event, SideBuildEvent):
        environment = event.environment
        versions = ", ".join(f"{name} {each}" for name, each in environment.versions.items() if name != "polyamp")
        where = f"{versions} on {environment.device}, {environment.parameters:,} parameters"
        return f"{escape(event.side)}: {escape(environment.model)}, {escape(where)}"
    if isinstance(event, SideFailureEvent):
        failure = event.failure
        if failure.reason == "missing":
            return f"[yellow]{escape(failure.side)} left out: not installed[/]"
        where = f" in step {failure.step} under {failure.phase}" if failure.phase else ""
        return f"[red]{escape(failure.side)} failed{escape(where)}: {failure.reason}[/]"
    return ""


def _metrics_text(event: SideProgressEvent) -> str:
    loss = "" if event.loss is None else f"   loss {event.loss:.4g}"
    scaling = ""
    if event.scale is not None and event.scale != 1.0:
        scaling = f"   scale {power_of_two(event.scale)}   skipped {event.skipped}"
    return loss + scaling

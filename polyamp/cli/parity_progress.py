"""Progress of `polyamp parity FILE.py`: a bar per side and phase on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskID

from polyamp.cli.progress import event_display
from polyamp.parity.execution.messages import (
    ParityEvent,
    SideBuildEvent,
    SideFailureEvent,
    SideFinishEvent,
    SideLaunchEvent,
)
from polyamp.parity.execution.messages import SideProgressEvent as Step

OnEvent = Callable[[ParityEvent], None]


def show_progress(console: Console) -> AbstractContextManager[OnEvent]:
    """Return a context manager that yields a function to show a comparison's events."""
    return event_display(console, _SideLines, _SideBars)


class _SideLines:
    """Printer of about four lines for each side and phase."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __call__(self, event: ParityEvent) -> None:
        text = _event_text(event)
        if isinstance(event, Step):
            quarters = [4 * step // event.steps for step in (event.step - 1, event.step)]
            if event.step == 1 or quarters[0] != quarters[1]:
                text = (
                    f"{escape(event.side)}, {escape(event.phase)}: step {event.step} of {event.steps}"
                    f"{_loss_text(event)}"
                )
        if text:
            self._console.print(text, soft_wrap=True)


class _SideBars:
    """Progress bars: one for each side and phase, and one for each side that builds its model."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[tuple[str, str], TaskID] = {}

    def __call__(self, event: ParityEvent) -> None:
        if isinstance(event, SideLaunchEvent):
            self._tasks[event.side, ""] = self._bars.add_task(f"{escape(event.side)}: building", total=None, at="")
            return
        side = event.failure.side if isinstance(event, SideFailureEvent) else event.side
        if (building := self._tasks.pop((side, ""), None)) is not None:
            self._bars.remove_task(building)
        if isinstance(event, Step):
            self._step(event)
        elif isinstance(event, SideFinishEvent):
            for (label, _), task in self._tasks.items():
                if label == side:
                    self._bars.update(task, completed=self._bars.tasks[self._bars.task_ids.index(task)].total)
        if text := _event_text(event):
            self._bars.console.print(text, soft_wrap=True)

    def _step(self, event: Step) -> None:
        key = event.side, event.phase
        if key not in self._tasks:
            label = f"{escape(event.side)} {escape(event.phase)}"
            self._tasks[key] = self._bars.add_task(label, total=event.steps, at="")
        self._bars.update(self._tasks[key], completed=event.step, at=_loss_text(event))


def _event_text(event: ParityEvent) -> str:
    """Return the permanent line for an event; "" if a bar is enough."""
    if isinstance(event, SideBuildEvent):
        place = event.environment
        versions = ", ".join(f"{name} {each}" for name, each in place.versions.items() if name != "polyamp")
        where = f"{versions} on {place.device}, {place.parameters:,} parameters"
        return f"{escape(event.side)}: {escape(place.model)}, {escape(where)}"
    if isinstance(event, SideFailureEvent):
        failure = event.failure
        at = f" in step {failure.step} under {failure.phase}" if failure.phase else ""
        return f"[red]{escape(failure.side)} failed{escape(at)}: {failure.reason}[/]"
    return ""


def _loss_text(event: Step) -> str:
    return "" if event.loss is None else f"   loss {event.loss:.4g}"

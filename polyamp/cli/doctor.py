"""The command `polyamp doctor`: which frameworks work here, and what each dtype is on their devices."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from json import dumps
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

import polyamp
from polyamp.cli import tables
from polyamp.cli.console import exit_with_error, make_console

if TYPE_CHECKING:
    from polyamp.contract.registry import BackendStatus
    from polyamp.doctor.examination import BackendExamination, ExaminationEvent

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and progress on standard error.")]
Names = Annotated[
    list[str] | None,
    typer.Option("--backend", metavar="NAME", help="A framework to measure (default: all). Repeatable."),
]
Float8 = Annotated[
    bool, typer.Option("--float8", help="Measure products in 8 bits against bfloat16 too, from small to large.")
]


def doctor(json: Json = False, backend: Names = None, float8: Float8 = False) -> None:
    """Say which frameworks work here, and measure what each dtype is on each of their devices.

    A matrix product, a convolution and attention run in float32, TF32, bfloat16, float16 and the float8 formats,
    forward and backward. A dtype is "native", "emulated", "float32 in disguise", "fails" or "missing". At the end
    stands the policy to train with, and what is known to go wrong in the installed version.

    Exit status: 0; 1 a framework is installed and does not work; 2 a wrong argument.
    """
    from polyamp.doctor.examination import examine

    console = make_console(stderr=json)
    statuses = _chosen(polyamp.backends(), backend)
    usable = [name for name, status in statuses.items() if status.usable]
    with _show_progress(console) as on_event:
        found = examine(usable, all_devices=True, float8=float8, on_event=on_event)
    statuses |= {name: _examined(statuses[name], each) for name, each in found.items()}
    broken = {name for name in usable if not statuses[name].usable}
    if json:
        typer.echo(dumps(_json_report(statuses, found), indent=2))
    else:
        console.print(f"polyamp {polyamp.__version__}, Python {platform.python_version()}, {platform.platform()}")
        console.print(tables.doctor_table(statuses, broken=broken))
        _print_devices(console, found)
    raise typer.Exit(1 if broken else 0)


def _chosen(statuses: dict[str, BackendStatus], names: list[str] | None) -> dict[str, BackendStatus]:
    """Return the statuses of these backends; of all for None."""
    for name in names or ():
        if name not in statuses:
            exit_with_error(f"--backend must be one of {', '.join(sorted(statuses))}. Received: {name!r}.")
    return {name: status for name, status in statuses.items() if names is None or name in names}


def _examined(status: BackendStatus, found: BackendExamination) -> BackendStatus:
    """Return the status of a backend that was imported."""
    if found.problem is not None:
        return status._replace(usable=False, devices=found.devices, problem=found.problem)
    return status._replace(version=found.version, devices=found.devices)


def _json_report(statuses: dict[str, BackendStatus], found: dict[str, BackendExamination]) -> dict[str, Any]:
    import msgspec

    rows = {
        name: status._asdict()
        | {"capabilities": msgspec.to_builtins(found[name].capabilities) if name in found else []}
        for name, status in statuses.items()
    }
    versions = {"polyamp": polyamp.__version__, "python": platform.python_version()}
    return {**versions, "platform": platform.platform(), "backends": rows}


def _print_devices(console: Console, found: dict[str, BackendExamination]) -> None:
    from polyamp.doctor.text_table import print_legend

    measured = [each for examined in found.values() for each in examined.capabilities]
    for each in measured:
        each.print(console)
    if measured:
        console.print()
        print_legend(console)


@contextmanager
def _show_progress(console: Console) -> Iterator[Callable[[ExaminationEvent], None]]:
    """Return a context manager that yields a function to show progress: a bar per framework on a terminal."""
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    words = {"import": "starting", "wait": "waiting for its turn", "end": "done"}
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:

        def show(event: ExaminationEvent) -> None:
            if event.backend not in tasks:
                tasks[event.backend] = bars.add_task(event.backend, total=None)
            doing = words.get(event.phase, f"measuring {event.device}")
            measuring = event.phase in ("measure", "end")
            bars.update(
                tasks[event.backend],
                description=f"{event.backend}: {doing}",
                total=event.total if measuring else None,
                completed=event.total if event.phase == "end" else event.done,
            )

        yield show

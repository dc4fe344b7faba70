"""The course of a framework's script: which workloads, at which batch, within which time; and its command line.

Called by `torch_side` and `jax_side`. No framework is imported here.
"""

from __future__ import annotations

import argparse
import math
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.common import results, workloads
from benchmarks.common.results import Entry, Results, Side
from benchmarks.common.workloads import Workload
from benchmarks.gpu.measurements import BLOCKS, GPT, MIB, PRECISIONS, RESNET, TITLES, Comparison, Engine, Settings

FULL: Final = (BLOCKS, workloads.MLP, GPT, RESNET)
REHEARSAL: Final = (
    Workload("block", batch=0, width=32, layers=2, heads=4, length=16),
    Workload("mlp", batch=4, width=8, layers=4),
    Workload("gpt", batch=0, width=32, layers=2, heads=4, length=16, vocabulary=64),
    Workload("resnet", batch=2, width=4, layers=1, length=8, vocabulary=10),
)

MEMORY_SHARE: Final = 0.6
"""Of the device's memory, for the handwritten float32 step; the rest is for the states of the other sides."""
LARGEST_BATCH: Final = 1024
QUICK_BATCH: Final = 8
REHEARSAL_BATCH: Final = 4

_STARTED: Final = time.perf_counter()
_FAILED: Final = "failed: "


# --- the batch


class Batch(NamedTuple):
    """A batch size and how it was found."""

    size: int
    how: str


def fitting_batch(needs: Callable[[int], float | None], limit: float, *, largest: int = LARGEST_BATCH) -> Batch:
    """The largest power of two whose measured need stays within a limit.

    Two small batches give a line, the line a first guess, which is measured itself and halved until it fits.

    Args:
        needs: batch size -> bytes, or None if the device has not enough.
        limit: bytes.
        largest: size not to go beyond.

    Raises:
        MemoryError: a batch of 1 does not fit.
    """
    small = [needs(1), needs(2)]
    if small[0] is None or small[0] > limit:
        raise MemoryError(f"a batch of 1 does not fit into {limit / MIB:.0f} MiB of device memory")
    each = max((small[1] or math.inf) - small[0], 1.0)
    fits = 1 + (limit - small[0]) / each
    size = 2 ** int(math.log2(max(1.0, min(fits, largest))))
    while size > 1:
        found = needs(size)
        if found is not None and found <= limit:
            return Batch(size, f"batch {size}: its float32 step by hand takes {found / MIB:.0f} MiB")
        size //= 2
    return Batch(1, f"batch 1: its float32 step by hand takes {small[0] / MIB:.0f} MiB")


def sized(engine: Engine, workload: Workload, settings: Settings) -> tuple[Workload, str]:
    """The workload with a batch, and how that was found."""
    if workload.batch:
        return workload, ""
    memory = engine.memory()
    if settings.quick or settings.rehearse or memory is None:
        size = REHEARSAL_BATCH if settings.rehearse else QUICK_BATCH
        return workload._replace(batch=size), f"batch {size}, not chosen by memory"
    found = fitting_batch(lambda size: engine.needs(workload._replace(batch=size)), MEMORY_SHARE * memory)
    engine.free()
    return workload._replace(batch=found.size), f"{found.how} of {memory / MIB:.0f}"


# --- the run


def plan(settings: Settings) -> list[tuple[Workload, tuple[str, ...]]]:
    """Workloads and their precisions, the most wanted first."""
    chosen = REHEARSAL if settings.rehearse else FULL
    if settings.quick:
        return [(chosen[0], PRECISIONS[:3]), (chosen[1], PRECISIONS[:2])]
    return [(each, PRECISIONS) for each in chosen]


def measure(engine: Engine, settings: Settings, keep: Callable[[list[Entry]], None]) -> list[Entry]:
    """Every row that the budget allows; `keep` is given what there is after each.

    What fails is printed and named in its row, and the rest goes on: a GPU is seldom at hand for a second try.
    """
    done: list[Entry] = []

    def keep_with(found: list[Entry]) -> None:
        keep([*done, *found])

    for workload, precisions in plan(settings):
        title = TITLES[workload.name]
        if _elapsed() > settings.budget:
            done.append(_without_figure(title, _no_time(settings)))
            continue
        try:
            sized_, note = sized(engine, workload, settings)
        except MemoryError as error:
            done.append(_without_figure(title, f"left out: {error}"))
        except Exception as error:  # noqa: BLE001  # whatever it is, it is printed, and the exit status tells
            done.append(_without_figure(title, _failed(error)))
        else:
            done.extend(_of_workload(engine, sized_, precisions, settings, note, keep_with))
        engine.free()
    keep(done)
    return done


def _of_workload(
    engine: Engine,
    workload: Workload,
    precisions: tuple[str, ...],
    settings: Settings,
    note: str,
    keep: Callable[[list[Entry]], None],
) -> list[Entry]:
    """The rows of one workload, at half of its batch if that runs out of memory."""
    title = TITLES[workload.name]
    comparison = Comparison(engine, workload, settings, note)
    for precision in precisions:
        if _elapsed() > settings.budget:
            comparison.entries.append(_without_figure(f"{title}, {precision}", _no_time(settings)))
            continue
        try:
            comparison.measure(precision)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is printed, and the exit status tells
            if engine.out_of_memory(error) and workload.batch > 1:
                break
            comparison.entries.append(_without_figure(f"{title}, {precision}", _failed(error)))
        print(f"{engine.name}: {title}, {precision} after {_elapsed():.0f} s", flush=True)
        keep(comparison.entries)
    else:
        return comparison.entries
    del comparison  # the error and its frames are gone here, and with them the tensors that they held
    engine.free()
    note = f"batch {workload.batch // 2}, since twice as much ran out of memory"
    return _of_workload(engine, workload._replace(batch=workload.batch // 2), precisions, settings, note, keep)


def _elapsed() -> float:
    return time.perf_counter() - _STARTED


def _no_time(settings: Settings) -> str:
    return f"left out: the {settings.budget:g} s of --budget were over"


def _failed(error: Exception) -> str:
    traceback.print_exception(error)
    return f"{_FAILED}{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"


def _without_figure(name: str, note: str) -> Entry:
    sides = (Side("polyamp", []), Side("by hand", []))
    return Entry(section="workloads", name=name, unit="s", own=sides[0], base=sides[1], note=note)


def settings_of(arguments: argparse.Namespace) -> Settings:
    """What the command line asks for."""
    chosen = Settings()
    if arguments.quick or arguments.rehearse:
        chosen = Settings(rounds=5, seconds=3.0, least=1e-9 if arguments.rehearse else Settings().least)
    return chosen._replace(budget=arguments.budget, quick=arguments.quick, rehearse=arguments.rehearse)


def options(parser: argparse.ArgumentParser, *, budget: float | None = Settings().budget) -> None:
    """The options that `gpu` passes on; `budget` is the default of its."""
    parser.add_argument("--quick", action="store_true", help="a short run at a small batch, held against no target")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU: nothing has a meaning")
    parser.add_argument(
        "--budget", type=float, default=budget, metavar="SECONDS", help="begin no further row after so many"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything measured, raw")


def write(path: Path, found: Results) -> None:
    """`results.write` at once: whoever reads the file meanwhile, or after an end in the middle, finds it whole."""
    unfinished = path.with_name(f"{path.name}.part")
    results.write(unfinished, found)
    unfinished.replace(path)


def main(doc: str | None, script: str, open_engine: Callable[[bool], Engine | str]) -> int:
    """The command line of a framework's script; the exit status is 1 if a row failed.

    Args:
        doc: its docstring.
        script: its file.
        open_engine: rehearse -> the engine, or why there is none and what to do.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser)
    arguments = parser.parse_args()
    settings = settings_of(arguments)
    engine = open_engine(settings.rehearse)

    def keep(entries: list[Entry]) -> None:
        environment: dict[str, Any] = {"missing": engine} if isinstance(engine, str) else engine.environment()
        if arguments.json:
            found = Results(
                script=Path(script).name,
                environment=environment,
                settings=settings._asdict(),
                entries=entries,
                seconds=_elapsed(),
            )
            write(arguments.json, found)

    if isinstance(engine, str):
        print(engine)
        keep([])
        return 0
    print(results.heading(engine.environment()), flush=True)
    entries = measure(engine, settings, keep)
    if not arguments.json:
        print(results.text(entries))
    return int(any(entry.note.startswith(_FAILED) for entry in entries))

"""The run of a framework's script of `gpu`: which workloads, at which batch, within which time; and its command line.

Called by `gpu_torch` and `gpu_jax`. No framework is imported here.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import results
import workloads
from gpu_rows import BLOCKS, GPT, MIB, PRECISIONS, RESNET, TITLES, Comparison, Engine, Settings
from results import Entry, Results, Side
from workloads import Workload

FULL: Final = (BLOCKS, workloads.MLP, GPT, RESNET)
REHEARSAL: Final = (
    Workload("block", batch=0, width=32, layers=2, heads=4, length=16),
    Workload("gpt", batch=0, width=32, layers=2, heads=4, length=16, vocabulary=64),
    Workload("mlp", batch=4, width=8, layers=4),
    Workload("resnet", batch=2, width=4, layers=1, length=8, vocabulary=10),
)

MEMORY_SHARE: Final = 0.6
"""Of the device's memory, for the handwritten float32 step; the rest is for the states of the other sides."""
LARGEST_BATCH: Final = 1024
QUICK_BATCH: Final = 8
REHEARSAL_BATCH: Final = 4

_STARTED: Final = time.perf_counter()


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
    if settings.quick:
        return [(BLOCKS, PRECISIONS[:3]), (workloads.MLP, PRECISIONS[:2])]
    chosen = REHEARSAL if settings.rehearse else FULL
    return [(each, PRECISIONS if each.name != "mlp" else PRECISIONS[:3]) for each in chosen]


def measure(engine: Engine, settings: Settings, keep: Callable[[list[Entry]], None]) -> list[Entry]:
    """Every row that the budget allows; `keep` is given what there is after each."""
    done: list[Entry] = []
    for workload, precisions in plan(settings):
        title = TITLES[workload.name]
        if _elapsed() > settings.budget:
            done.append(_left_out(title, _no_time(settings)))
            continue
        try:
            sized_, note = sized(engine, workload, settings)
        except MemoryError as error:
            done.append(_left_out(title, str(error)))
            continue
        while True:
            comparison = Comparison(engine, sized_, settings, note)
            try:
                for precision in precisions:
                    if _elapsed() > settings.budget:
                        comparison.entries.append(_left_out(f"{title}, {precision}", _no_time(settings)))
                        continue
                    comparison.measure(precision)
                    print(f"{engine.name}: {title}, {precision} after {_elapsed():.0f} s", flush=True)
                    keep([*done, *comparison.entries])
                break
            except Exception as error:
                if not engine.out_of_memory(error) or sized_.batch == 1:
                    raise
            del comparison  # the error and its frames are gone here, and with them the tensors that they held
            engine.free()
            sized_ = sized_._replace(batch=sized_.batch // 2)
            note = f"batch {sized_.batch}, since twice as much ran out of memory"
        done += comparison.entries
        del comparison
        engine.free()
    keep(done)
    return done


def _elapsed() -> float:
    return time.perf_counter() - _STARTED


def _no_time(settings: Settings) -> str:
    return f"the {settings.budget:g} s of --budget were over"


def _left_out(name: str, why: str) -> Entry:
    sides = (Side("polyamp", []), Side("by hand", []))
    return Entry(section="workloads", name=name, unit="s", own=sides[0], base=sides[1], note=f"left out: {why}")


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


def main(doc: str | None, script: str, open_engine: Callable[[bool], Engine | str]) -> None:
    """The command line of a framework's script.

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
            results.write(arguments.json, found)

    if isinstance(engine, str):
        print(engine)
        keep([])
        return
    print(results.heading(engine.environment()), flush=True)
    entries = measure(engine, settings, keep)
    if not arguments.json:
        print(results.text(entries))

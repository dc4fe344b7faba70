"""polyamp on one NVIDIA GPU, in torch and JAX: python benchmarks/gpu.py [--framework torch jax] [--quick] [--json PATH]

Trains GPT-2 small's twelve blocks (width 768, 12 heads, length 1024), GPT-2 small whole, `workloads.MLP` and a ResNet
in float32 without and with TF32, bfloat16 and float16, by hand and with polyamp, and prints

    time of a step      of both sides in turns within each round, and of polyamp's over its own float32
    MFU                 model FLOP utilisation of the transformers: `devices` has the formula and its source
    peak memory         of a step with its weights, optimizer state and batch
    host waits          how often the host waits for the device within a step

A transformer's batch is the largest power of two whose float32 step fits into `run_plan.MEMORY_SHARE` of the memory, as
measured. Before anything is timed, the first losses of both sides are held against those of float32 by hand; a side
that is further away than `rows.TOLERANCE` gets no figure. Each framework runs in a process of its own.

Takes nine minutes at most for both frameworks, --quick 90 seconds; rows that no time is left for are named. Needs
polyamp, torch with CUDA, jax with CUDA, flax and optax in this interpreter's environment; what is missing is named and
left out. Without a GPU it says so and exits with 0. It judges nothing: the exit status is 1 if a row or a framework's
process failed, never because a target was missed. What is measured is written as it comes: a run that is cut off leaves
its rows behind. --rehearse runs everything at tiny sizes on the CPU, to see that it works.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.common import environments, results
from benchmarks.common.results import Entry, Results
from benchmarks.gpu import run_plan

FRAMEWORKS: Final = {"torch": ("torch",), "jax": ("jax", "flax", "optax")}
"""Framework -> the packages that its script imports."""
FOLDER: Final = Path(__file__).parent
INSTALL: Final = {"torch": "pip install torch", "jax": "pip install 'jax[cuda12]' flax optax"}
BUDGET: Final = 500.0
QUICK_BUDGET: Final = 80.0
REHEARSAL_BUDGET: Final = 1800.0
_GRACE: Final = 60.0
"""Seconds for the row that was begun last, and for the start."""
_GLANCE: Final = 5.0
"""Seconds between two looks at what a framework's process has written."""
_MEANINGLESS: Final = "A rehearsal at tiny sizes on the CPU: nothing here has a meaning."


def no_gpu() -> str | None:
    """Why there is no NVIDIA GPU here, by the driver itself; None if there is one. `CUDA_VISIBLE_DEVICES` counts."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return "the NVIDIA driver is not installed"
    status = driver.cuInit(0)
    count = ctypes.c_int(0)
    status = status or driver.cuDeviceGetCount(ctypes.byref(count))
    if status:
        return f"the NVIDIA driver finds no device (CUDA error {status})"
    return None if count.value else "the NVIDIA driver finds no device"


def missing(framework: str) -> str | None:
    """Which packages a framework's script lacks here, and how to get them; None if none."""
    lacking = [name for name in FRAMEWORKS[framework] if importlib.util.find_spec(name) is None]
    if not lacking:
        return None
    return f"{framework} is left out, {' and '.join(lacking)} not being installed here: {INSTALL[framework]}"


def run(
    framework: str, arguments: argparse.Namespace, budget: float, keep: Callable[[Results], None]
) -> tuple[Results | None, str]:
    """A framework's results, and what is to be said of it: nothing, why it is left out, or how it failed.

    Of a process that does not end in time, the rows that it had finished are kept. `keep` is given what it has written
    so far, every few seconds.
    """
    hidden = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"} if arguments.rehearse else {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        command = [sys.executable, str(FOLDER / f"{framework}_side.py"), "--json", str(path)]
        command += ["--budget", f"{budget:.0f}"]
        command += [f"--{name}" for name in ("quick", "rehearse") if getattr(arguments, name)]
        said, end = "", time.perf_counter() + budget + _GRACE
        with subprocess.Popen(command, env={**environments.variables(), **hidden}) as process:
            try:
                while (status := _status(process)) is None and time.perf_counter() < end:
                    if path.exists():
                        keep(results.read(path))
            finally:
                process.kill()  # also when this process is ended: nothing goes on using the GPU
        if status is None:
            said = f"{framework} failed: its process was ended after {budget + _GRACE:.0f} s"
        elif status:
            said = f"{framework} failed: its process ended with status {status}"
        found = results.read(path) if path.exists() else None
    if found is not None and "missing" in found.environment:
        return None, f"{framework} is left out: {found.environment['missing']}"
    return found, said


def _status(process: subprocess.Popen[bytes]) -> int | None:
    """A process's exit status, waited for a few seconds; None if it runs on."""
    try:
        return process.wait(_GLANCE)
    except subprocess.TimeoutExpired:
        return None


def gathered(found: dict[str, Results], quick: bool, rehearse: bool) -> Results:
    """All frameworks' results as one, the framework before each name."""
    entries: list[Entry] = [
        msgspec.structs.replace(entry, name=f"{name}: {entry.name}")
        for name, part in found.items()
        for entry in part.entries
    ]
    return Results(
        script="gpu.py",
        environment={name: part.environment for name, part in found.items()},
        settings={"quick": quick, "rehearsal": rehearse},
        entries=entries,
        seconds=sum(part.seconds for part in found.values()),
    )


def heading(found: Results) -> str:
    """What was measured on what, a line for each framework."""
    facts: list[dict[str, Any]] = list(found.environment.values())
    lines = [results.heading(*facts)]
    if found.settings["rehearsal"]:
        lines.insert(0, _MEANINGLESS)
    elif found.settings["quick"]:
        lines.insert(0, "A quick run: everything works, the figures mean little and are held against no target.")
    return "\n".join(lines)


def write(whole: Results, said: list[str], arguments: argparse.Namespace) -> None:
    """What --json and --markdown ask for."""
    if arguments.json:
        run_plan.write(arguments.json, whole)
    if arguments.markdown:
        facts = "\n".join(f"- {line}" for line in [*heading(whole).splitlines(), *said])
        arguments.markdown.parent.mkdir(parents=True, exist_ok=True)
        arguments.markdown.write_text(f"{facts}\n\n{results.markdown(whole.entries)}")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", nargs="+", choices=list(FRAMEWORKS), default=list(FRAMEWORKS), help="which")
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="write the tables as Markdown")
    run_plan.options(parser, budget=None)
    arguments = parser.parse_args()
    reason = None if arguments.rehearse else no_gpu()
    if reason is not None:
        print(f"nothing is measured: {reason}. Run this where a GPU is, or with --rehearse to see that it works.")
        return 0
    usual = REHEARSAL_BUDGET if arguments.rehearse else QUICK_BUDGET if arguments.quick else BUDGET
    budget = arguments.budget or usual
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    found: dict[str, Results] = {}
    said: list[str] = []

    def keep(framework: str, part: Results) -> None:
        if part.entries:
            found[framework] = part
        write(gathered(found, arguments.quick, arguments.rehearse), said, arguments)

    started = time.perf_counter()
    for place, framework in enumerate(arguments.framework):
        left = budget - (time.perf_counter() - started)
        part, message = None, missing(framework)
        if message is None:
            share = max(1.0, left / (len(arguments.framework) - place))
            part, message = run(framework, arguments, share, functools.partial(keep, framework))
        said += [message] if message else []
        if part is not None:
            keep(framework, part)
    whole = gathered(found, arguments.quick, arguments.rehearse)
    if found:
        print(f"\n{heading(whole)}\n\n{results.text(whole.entries)}")
    print("".join(f"\n{message}" for message in said))
    write(whole, said, arguments)
    return int(any(" failed: " in message for message in said))


if __name__ == "__main__":
    sys.exit(main())

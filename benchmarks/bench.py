"""All benchmarks: `make bench`, or `polyamp bench` in a checkout.

Runs the scripts of `PARTS` one after the other, nothing beside them (with --quick two at a time), each in a process and
in the environment of its framework, which is made first (minutes, once). Then prints one table for each section against
the targets and writes

    out/bench/bench.json    everything measured, raw
    out/bench/bench.md      the same tables as Markdown

The whole run takes about 13 minutes on two CPU cores, with --quick two: then the figures say only that everything
works. It judges nothing: the exit status is 1 if a script failed, never because a target was missed.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[1])]  # this folder's torch/ and jax/ are not the frameworks

from benchmarks.common import environments, results
from benchmarks.common.results import Entry, Results

FOLDER = Path(__file__).parent
PARTS = (
    "import_time",
    "porting",
    "torch_step",
    "torch_workloads",
    "torch_peers",
    "torch_distributed",
    "jax_step",
    "jax_loss_scaling",
    "jax_workloads",
    "jax_peers",
    "jax_distributed",
    "tensorflow_step",
    "tensorflow_workloads",
    "tensorflow_peers",
    "tensorflow_replicas",
)
TIMEOUT = 900.0
"""Seconds after which a part that hangs is ended."""


class Failure(msgspec.Struct, frozen=True):
    """A part that did not end well, and the end of what it printed."""

    part: str
    message: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a run writes to bench.json."""

    date: str
    machine: dict[str, Any]
    quick: bool
    seconds: float
    parts: list[Results]
    failures: list[Failure]


def framework(part: str) -> str | None:
    """The framework that a part measures; None for the core."""
    return next((name for name in environments.FRAMEWORKS if part.startswith(name)), None)


def script(part: str) -> Path:
    """The file of a part: `torch_step` is torch/step.py."""
    name = framework(part)
    return FOLDER / f"{part}.py" if name is None else FOLDER / name / f"{part.removeprefix(f'{name}_')}.py"


def run(part: str, *, here: bool, quick: bool) -> Results | Failure:
    """One part in a process of its own.

    Args:
        part: of `PARTS`.
        here: in this environment instead of the framework's own.
        quick: pass --quick.
    """
    name = framework(part)
    python = sys.executable if here or name is None else str(environments.interpreter(name))
    variables = environments.variables()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        command = [python, str(script(part)), "--json", str(path), *(["--quick"] if quick else [])]
        try:
            done = subprocess.run(
                command, check=False, capture_output=True, text=True, errors="replace", env=variables, timeout=TIMEOUT
            )
        except subprocess.TimeoutExpired:
            return Failure(part, f"took longer than {TIMEOUT:.0f} s")
        if done.returncode or not path.exists():
            return Failure(part, f"status {done.returncode}:\n{(done.stdout + done.stderr)[-2000:].strip()}")
        return results.read(path)


def gather(parts: Sequence[str], *, here: bool, quick: bool) -> Report:
    """Install what is missing, run the parts in turn and say so."""
    started = time.perf_counter()
    if not here:
        for name in environments.FRAMEWORKS:
            if any(framework(part) == name for part in parts) and not environments.is_current(name):
                print(f"installing {name} and its peers into {environments.folder(name).name}", flush=True)
                environments.install(name)
        started = time.perf_counter()  # what is installed once is not part of a run
    with ThreadPoolExecutor(2 if quick else 1) as pool:
        outcomes = list(pool.map(lambda part: _said(part, here=here, quick=quick), parts))
    return Report(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        machine=results.machine(),
        quick=quick,
        seconds=time.perf_counter() - started,
        parts=[outcome for outcome in outcomes if isinstance(outcome, Results)],
        failures=[outcome for outcome in outcomes if isinstance(outcome, Failure)],
    )


def _said(part: str, *, here: bool, quick: bool) -> Results | Failure:
    begin = time.perf_counter()
    outcome = run(part, here=here, quick=quick)
    end = "failed" if isinstance(outcome, Failure) else "done"
    print(f"{part:22}{end} after {time.perf_counter() - begin:4.0f} s", flush=True)
    return outcome


def entries(report: Report) -> list[Entry]:
    """Every part's entries, the framework before each name."""
    return [
        msgspec.structs.replace(entry, name=f"{prefix}: {entry.name}") if (prefix := framework(part.script)) else entry
        for part in report.parts
        for entry in part.entries
    ]


def heading(report: Report) -> str:
    """Date, machine and every framework's versions."""
    lines = [results.heading({"date": report.date, **report.machine})]
    for part in report.parts:
        own = {name: value for name, value in part.environment.items() if name not in report.machine}
        line = results.heading(own, part.settings).replace("\n", "; ")
        lines.append(f"{part.script.removesuffix('.py')}: {line}")
    return "\n".join(lines)


def summary(report: Report) -> str:
    """How many targets hold, and which do not."""
    judged = [(entry, results.holds(entry)) for entry in entries(report)]
    missed = [entry.name + (f" ({entry.base.name})" if entry.base else "") for entry, met in judged if met is False]
    met = sum(verdict is True for _, verdict in judged)
    lines = [f"{met} of {met + len(missed)} targets met, {report.seconds:.0f} s"]
    if missed:
        lines.append(f"missed: {'; '.join(missed)}")
    if report.quick:
        lines.append("A quick run: everything works, the figures mean nothing.")
    return "\n".join(lines)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a run of under two minutes that shows that all works")
    parser.add_argument("--only", nargs="+", default=[""], metavar="PART", help="parts whose name starts so")
    parser.add_argument(
        "--here", action="store_true", help="in this environment; peers that it lacks are named in their rows"
    )
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder to write to (default: out/bench)")
    arguments = parser.parse_args()
    parts = [part for part in PARTS if part.startswith(tuple(arguments.only))]
    if not parts:
        parser.error(f"argument --only: no part starts with {' or '.join(arguments.only)}; parts: {', '.join(PARTS)}")
    try:
        report = gather(parts, here=arguments.here, quick=arguments.quick)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    listed = entries(report)
    print(f"\n{heading(report)}\n\n{results.text(listed)}\n\n{summary(report)}")
    for failure in report.failures:
        print(f"\n{failure.part} failed: {failure.message}", file=sys.stderr)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "bench.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    facts = "\n".join(f"- {line}" for line in heading(report).splitlines())
    (arguments.out / "bench.md").write_text(f"{facts}\n\n{results.markdown(listed)}\n{summary(report)}\n")
    print(f"wrote {arguments.out / 'bench.json'} and {arguments.out / 'bench.md'}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())

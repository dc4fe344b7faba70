"""Everything that `make test` runs: lint, types, then the test suites, one framework per process.

    python tests/run.py [--check | --only NAME ...] [--jobs N]

Every suite runs even if an earlier one failed, so that one run shows all there is to mend; two at a time where there
are two processors, the longest first, so that no long one is left alone at the end. A line says when a suite starts
and when it ends, with the time of day; in between one says how far the running ones are, once a minute (on a terminal,
once a second in one place). What a suite printed follows only where it failed. At the end stand the seconds of every
suite and its slowest tests, and in the last line how many tests passed, or which suites failed. A suite that executes
no test fails (pytest's exit status 5).

`--check` is what to run while writing: lint, types, the core, the reference, and a few tests of every framework.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[1])]  # the folder above, where `tests` is found

from tests import xla

ROOT = Path(__file__).resolve().parents[1]
FRAMEWORKS = ("torch", "tensorflow", "jax")
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "tests.garbage", "--durations=10", "--durations-min=1"]
CONFORMANCE = [
    *PYTEST,
    "--pyargs",
    "polyamp.conformance",
    "--polyamp-deviations=tests/conformance/deviations.py",
]
QUICK_XLA = ["-p", "tests.xla"]
BITS = "s04_sensitive"
"""Tests that compare two programs bit for bit: XLA's cheapest code rounds the same operation in two ways."""
THREADS = {"OMP_NUM_THREADS": "1"}
"""As many suites as processors run at once, and OpenMP's threads spin while they wait for one that has none: a part of
torch's conformance suite beside other processes took 26 s of processor time with two threads, and 9 s with one."""
BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}
"""Python keeps what it compiles, even where it is told not to, as in many containers. `make` installs without bytecode,
and many processes of the suites import a framework or polyamp: 20 s of processor time for TensorFlow and Keras without
bytecode and 9 s with it, 4.7 s and 2.1 s for JAX and its libraries, 4.8 s and 2.9 s for torch."""
SMOKE = "s01_masters or s03_inner or s04_sensitive or s07_gradients or s08_micro or s09_unscale or s11 or s14_several"


class Suite(NamedTuple):
    """A command, about how many seconds it takes of one processor (only the order of the suites hangs on it), and
    environment variables of its own."""

    command: list[str]
    seconds: int
    variables: Mapping[str, str] = {}


SUITES: dict[str, Suite] = {
    "lint": Suite([sys.executable, "-m", "ruff", "check", "."], 1),
    "format": Suite([sys.executable, "-m", "ruff", "format", "--check", "."], 1),
    "types": Suite([sys.executable, "-m", "mypy"], 50),
    "core": Suite([*PYTEST, "tests/core"], 130),
    "doctest-core": Suite(
        [*PYTEST, "--doctest-modules", "polyamp", "--ignore=polyamp/conformance"],
        10,
    ),
    "conformance-reference": Suite([*CONFORMANCE, "--polyamp-backend=reference"], 15),
    "mutants": Suite([*PYTEST, "tests/mutants"], 15),
    "fuzz": Suite([*PYTEST, "tests/fuzz"], 35),
    "programs": Suite([*PYTEST, "tests/programs"], 35),
    "porting": Suite([*PYTEST, "tests/porting"], 200),
    "parity": Suite([*PYTEST, *QUICK_XLA, "tests/parity"], 170),
    "simulated-device": Suite([*PYTEST, "tests/simulated_device"], 10),  # torch has it for a whole process
    "packaging": Suite([*PYTEST, "tests/packaging"], 90),
    "soak": Suite([*PYTEST, "tests/soak"], 60),
    # Only that every benchmark runs to its end: the figures of a quick run beside other suites mean nothing.
    "benchmarks": Suite(
        [sys.executable, "benchmarks/bench.py", "--quick", "--here", "--out", "out/bench-quick"],
        150,
        {"XLA_FLAGS": xla.FLAGS} if xla.known() else {},
    ),
}
for _name, _seconds in {
    "torch": (35, 620, 10, 35),
    "tensorflow": (280, 640, 10, 85),
    "jax": (190, 600, 10, 70),
}.items():
    _quick = [] if _name == "torch" else QUICK_XLA
    SUITES[f"conformance-{_name}"] = Suite([*CONFORMANCE, *_quick, f"--polyamp-backend={_name}"], _seconds[0])
    SUITES[f"smoke-{_name}"] = Suite([*CONFORMANCE, f"--polyamp-backend={_name}", "-k", SMOKE], 30)
    SUITES[f"backend-{_name}"] = Suite([*PYTEST, *_quick, f"tests/backends/{_name}"], _seconds[1])
    _folder = f"backends/polyamp_{_name}"
    SUITES[f"doctest-{_name}"] = Suite([*PYTEST, *_quick, "--doctest-modules", _folder], _seconds[2])
    SUITES[f"examples-{_name}"] = Suite([*PYTEST, "tests/examples", f"--framework={_name}"], _seconds[3])
    SUITES[f"mistakes-{_name}"] = Suite([*PYTEST, *_quick, "tests/mistakes", f"--framework={_name}"], 15)
for _name in FRAMEWORKS:
    _quick = [] if _name == "torch" else QUICK_XLA
    SUITES[f"keras-{_name}"] = Suite([*PYTEST, *_quick, "tests/backends/keras"], 30, {"KERAS_BACKEND": _name})
for _name, _seconds in {"torch": 80, "jax": 250}.items():  # on TensorFlow, conformance-tensorflow is of Keras models
    SUITES[f"conformance-keras-{_name}"] = Suite(
        [*CONFORMANCE, *([] if _name == "torch" else QUICK_XLA), f"--polyamp-backend=keras-{_name}"],
        _seconds,
        {"KERAS_BACKEND": _name},
    )
SUITES["keras-jax"].command.extend(  # where `stateless_apply` is too; the engines import other frameworks
    ["--doctest-modules", "backends/polyamp_keras", "--ignore=backends/polyamp_keras/engines"]
)
_apart = "tests/backends/jax/distributed"  # JAX makes several devices of the CPU for a whole process or not at all
SUITES["backend-jax"].command.append(f"--ignore={_apart}")
SUITES["distributed-jax"] = Suite(
    [*PYTEST, _apart],
    65,
    {"XLA_FLAGS": f"{xla.FLAGS if xla.known() else ''} --xla_force_host_platform_device_count=4"},
)
SUITES["conformance-jax"].command.extend(["-p", "tests.conformance.other_platforms", "-k", f"not {BITS}"])
SUITES["conformance-jax-bits"] = Suite([*CONFORMANCE, "--polyamp-backend=jax", "-k", BITS], 20)

ALL = tuple(name for name in SUITES if not name.startswith("smoke-"))
CHECK = ("lint", "format", "types", "core", "conformance-reference", *(f"smoke-{name}" for name in FRAMEWORKS))
"""The smoke suites are some of the conformance suites' tests, and so are no part of `make test`."""


class Running(NamedTuple):
    """A suite that runs: when it began (`time.perf_counter`), and what it printed until now, line by line."""

    begun: float
    lines: list[str]

    @property
    def percent(self) -> str:
        """How far pytest is by its own count; nothing for what is not pytest's."""
        for line in reversed(self.lines):
            if found := re.search(r"\[ *(\d+)%\]$", line):
                return f" {found[1]} %"
        return ""


class Outcome(NamedTuple):
    """How a suite ended: what it printed, on either stream, its exit status, and how long it took in seconds."""

    output: str
    status: int
    seconds: float

    @property
    def counts(self) -> str:
        """pytest's closing line without its time, `3 failed, 40 passed`; nothing for what is not pytest's."""
        closing = re.search(r"^=*\s*((?:\d+ \w+(?:, )?)+) in [\d.]+s", (self.output.rstrip().splitlines() or [""])[-1])
        return closing[1] if closing else ""

    @property
    def passed(self) -> int:
        """How many tests passed."""
        found = re.search(r"\b(\d+) passed\b", self.counts)
        return int(found[1]) if found else 0

    @property
    def slowest(self) -> list[tuple[float, str]]:
        """pytest's slowest tests with the seconds of each, its set-up and clean-up included where they are listed."""
        seconds: dict[str, float] = {}
        for time_, test in re.findall(r"^([\d.]+)s (?:call|setup|teardown) +(.+)$", self.output, re.MULTILINE):
            seconds[test] = seconds.get(test, 0.0) + float(time_)
        return sorted(((s, test) for test, s in seconds.items()), reverse=True)

    @property
    def remarks(self) -> list[str]:
        """What pytest says of tests that did not simply pass: skipped, or expected to fail."""
        return re.findall(r"^(?:SKIPPED|XFAIL|XPASS).*$", self.output, re.MULTILINE)


class Screen:
    """Lines with the time of day, and one line of what runs now: in place on a terminal, once a minute elsewhere."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live = sys.stdout.isatty()
        self._said = time.perf_counter()

    def say(self, text: str = "") -> None:
        """A line that stays, or several."""
        with self._lock:
            print(("\r\033[K" if self._live else "") + text, flush=True)

    def event(self, text: str) -> None:
        """A line that stays, with the time of day."""
        self.say(f"{time.strftime('%H:%M:%S')}  {text}")

    def now(self, running: dict[str, Running], waiting: int) -> None:
        """What runs at this moment; to be called about once a second."""
        moment = time.perf_counter()
        parts = [f"{name} {moment - suite.begun:.0f} s{suite.percent}" for name, suite in running.items()]
        line = f"{time.strftime('%H:%M:%S')}  running: {', '.join(parts)}; {waiting} waiting"
        if self._live:
            with self._lock:
                print("\r\033[K" + line[: shutil.get_terminal_size().columns - 1], end="", flush=True)
        elif moment - self._said >= 60:
            self._said = moment
            self.say(line)


def run(name: str, running: dict[str, Running], screen: Screen) -> Outcome:
    """Run one suite to its end; `running` holds it until then."""
    suite = running[name] = Running(time.perf_counter(), [])
    screen.event(f"{name} starts")
    with subprocess.Popen(
        SUITES[name].command,
        cwd=ROOT,
        env={**THREADS, **os.environ, **BYTECODE, "PYTHONUNBUFFERED": "1", **SUITES[name].variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            suite.lines.append(line.rstrip("\n"))
    del running[name]
    outcome = Outcome("\n".join(suite.lines), process.returncode, time.perf_counter() - suite.begun)
    how = f"FAILED (exit status {outcome.status})" if outcome.status else "done"
    event = ", ".join(filter(None, [f"{name} {how} after {outcome.seconds:.0f} s", outcome.counts]))
    if outcome.status:
        screen.say(f"\n=== {name}: {' '.join(SUITES[name].command[1:])}\n{outcome.output.rstrip()}\n")
    else:
        event += "".join(f"\n          {remark}" for remark in outcome.remarks)
    screen.event(event)
    return outcome


def summary(outcomes: dict[str, Outcome]) -> str:
    """A line per suite, the longest first, each followed by its slowest tests."""
    lines = ["seconds  tests  suite"]
    for name, outcome in sorted(outcomes.items(), key=lambda item: -item[1].seconds):
        count = str(outcome.passed) if outcome.counts else "-"
        lines.append(f"{outcome.seconds:7.1f} {count:>6}  {name}{'  FAILED' if outcome.status else ''}")
        lines += [f"{seconds:7.1f}             {test}" for seconds, test in outcome.slowest]
    return "\n".join(lines)


def run_all(chosen: list[str], jobs: int) -> dict[str, Outcome]:
    """Run the suites, the longest first, `jobs` at a time."""
    screen, running = Screen(), dict[str, Running]()
    order = sorted(chosen, key=lambda name: -SUITES[name].seconds)
    screen.event(f"{len(chosen)} suites, {min(jobs, len(chosen))} at a time")
    with ThreadPoolExecutor(jobs) as pool:
        futures: dict[str, Future[Outcome]] = {name: pool.submit(run, name, running, screen) for name in order}
        while left := wait(futures.values(), timeout=1).not_done:
            screen.now(dict(running), max(len(left) - len(running), 0))
    return {name: future.result() for name, future in futures.items()}


def main() -> int:
    """Run the chosen suites; the exit status is 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", nargs="+", metavar="NAME", choices=list(SUITES), help=f"from {', '.join(SUITES)}")
    which.add_argument("--check", action="store_true", help=f"only {', '.join(CHECK)}")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="suites at a time (default: 2)")
    arguments = parser.parse_args()
    chosen = list(arguments.only or (CHECK if arguments.check else ALL))
    begun = time.perf_counter()
    outcomes = run_all(chosen, arguments.jobs)
    failed = [name for name, outcome in outcomes.items() if outcome.status]
    print(f"\n{summary(outcomes)}")
    if failed:
        print(f"\nfailed suites: {', '.join(failed)}", flush=True)
    else:
        passed = sum(outcome.passed for outcome in outcomes.values())
        print(f"\n{passed} passed in {time.perf_counter() - begun:.0f} s, in {len(chosen)} suites", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

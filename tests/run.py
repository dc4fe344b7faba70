"""Everything that `make test` runs: lint, types, then the test suites, one framework per process.

    python tests/run.py [--only NAME ...] [--jobs N]

Every suite runs even if an earlier one failed, so that one run shows all there is to mend; two at a time where there
are two processors, each one's output as a whole when it ends. A suite that executes no test fails (pytest's exit
status 5). The last line counts the tests of all suites that passed, or names the suites that failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FRAMEWORKS = ("torch", "tensorflow", "jax")
PYTEST = [sys.executable, "-m", "pytest", "-q"]
CONFORMANCE = [
    *PYTEST,
    "--pyargs",
    "polyamp.conformance",
    "--polyamp-deviations=tests/conformance/deviations.py",
]

SUITES: dict[str, list[str]] = {
    "lint": [sys.executable, "-m", "ruff", "check", "."],
    "format": [sys.executable, "-m", "ruff", "format", "--check", "."],
    "types": [sys.executable, "-m", "mypy"],
    "core": [*PYTEST, "tests/core"],
    "doctest-core": [*PYTEST, "--doctest-modules", "polyamp", "--ignore=polyamp/conformance"],
    "conformance-reference": [*CONFORMANCE, "--polyamp-backend=reference"],
}
for name in FRAMEWORKS:
    SUITES[f"conformance-{name}"] = [*CONFORMANCE, f"--polyamp-backend={name}"]
    SUITES[f"backend-{name}"] = [*PYTEST, f"tests/backends/{name}"]
    SUITES[f"doctest-{name}"] = [*PYTEST, "--doctest-modules", f"backends/polyamp_{name}"]
    SUITES[f"examples-{name}"] = [*PYTEST, "tests/examples", f"--framework={name}"]
SUITES["fuzz"] = [*PYTEST, "tests/fuzz"]
SUITES["packaging"] = [*PYTEST, "tests/packaging"]
SUITES["benchmarks"] = [sys.executable, "benchmarks/bench.py", "--quick", "--here", "--out", "out/bench-quick"]
"""Only that every benchmark runs to its end: the figures of a quick run beside other suites mean nothing."""


LONG = ("backend-jax", "backend-tensorflow")
"""Started before the others, so that no long one is left to run alone at the end."""


class Outcome(NamedTuple):
    """What a suite printed, on either stream, its exit status and how long it took in seconds."""

    output: str
    status: int
    seconds: float


def run(name: str) -> Outcome:
    """Run one suite to its end."""
    start = time.perf_counter()
    done = subprocess.run(
        SUITES[name],
        cwd=ROOT,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return Outcome(done.stdout, done.returncode, time.perf_counter() - start)


def tests_passed(output: str) -> int:
    """How many tests pytest's closing line counts; 0 for what is not pytest's."""
    closing = re.search(r"\b(\d+) passed\b", (output.rstrip().splitlines() or [""])[-1])
    return int(closing[1]) if closing else 0


def main() -> int:
    """Run the chosen suites; the exit status is 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(SUITES), help=f"from {', '.join(SUITES)}")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="suites at a time (default: 2)")
    arguments = parser.parse_args()
    chosen = arguments.only or list(SUITES)
    begun = time.perf_counter()
    failed, passed = [], 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        running = {pool.submit(run, name): name for name in sorted(chosen, key=lambda name: name not in LONG)}
        for future in as_completed(running):
            name, outcome = running[future], future.result()
            print(f"\n=== {name}: {' '.join(SUITES[name][1:])}\n{outcome.output.rstrip()}", flush=True)
            passed += tests_passed(outcome.output)
            if outcome.status:
                failed.append(name)
                print(f"=== {name} FAILED after {outcome.seconds:.0f} s", flush=True)
    if failed:
        print(f"\nfailed suites: {', '.join(failed)}", flush=True)
    else:
        print(f"\n{passed} passed in {time.perf_counter() - begun:.0f} s, in {len(chosen)} suites", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

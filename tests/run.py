"""Everything that `make test` runs: lint, types, then the test suites, one framework per process.

    python tests/run.py [--only NAME ...]

Every suite runs even if an earlier one failed, so that one run shows all there is to mend. A suite that executes no
test fails (pytest's exit status 5). When all pass, the last line is pytest's own closing line.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FRAMEWORKS = ("torch", "tensorflow", "jax")
PYTEST = [sys.executable, "-m", "pytest", "-q"]
CONFORMANCE = [
    *PYTEST,
    "--pyargs",
    "polyamp.testing.conformance",
    "--polyamp-deviations=tests/conformance/deviations.py",
]

SUITES: dict[str, list[str]] = {
    "lint": [sys.executable, "-m", "ruff", "check", "."],
    "format": [sys.executable, "-m", "ruff", "format", "--check", "."],
    "types": [sys.executable, "-m", "mypy"],
    "core": [*PYTEST, "tests/core"],
    "doctest-core": [*PYTEST, "--doctest-modules", "polyamp", "--ignore=polyamp/testing/conformance"],
    "conformance-reference": [*CONFORMANCE, "--polyamp-backend=reference"],
}
for name in FRAMEWORKS:
    SUITES[f"conformance-{name}"] = [*CONFORMANCE, f"--polyamp-backend={name}"]
    SUITES[f"backend-{name}"] = [*PYTEST, f"tests/backends/{name}"]
    SUITES[f"doctest-{name}"] = [*PYTEST, "--doctest-modules", f"backends/polyamp_{name}"]
    SUITES[f"examples-{name}"] = [*PYTEST, "tests/examples", f"--framework={name}"]
SUITES["packaging"] = [*PYTEST, "tests/packaging"]


def main() -> int:
    """Run the chosen suites in order; the exit status is 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(SUITES), help=f"from {', '.join(SUITES)}")
    chosen = parser.parse_args().only or list(SUITES)
    failed = []
    for name in chosen:
        print(f"\n=== {name}: {' '.join(SUITES[name][1:])}", flush=True)
        start = time.perf_counter()
        if subprocess.run(SUITES[name], cwd=ROOT, check=False).returncode:
            failed.append(name)
            print(f"=== {name} FAILED after {time.perf_counter() - start:.0f} s", flush=True)
    if failed:
        print(f"\nfailed suites: {', '.join(failed)}", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

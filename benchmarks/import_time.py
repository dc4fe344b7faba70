"""Measures `import polyamp` and its first names against a bare interpreter, interleaved; the difference is what counts.

Run by hand and by `make bench`. Bytecode is compiled first, into a folder of its own, as installing a wheel does.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[1])]  # this folder's torch/ and jax/ are not the frameworks

from benchmarks.common import paired_timing, results
from benchmarks.common.results import Entry, Side

BARE, IMPORTED = "pass", "import polyamp; polyamp.Recipe; polyamp.init; polyamp.train_step"
"""Names are imported when they are first asked for: these bring all that a training step needs."""
_TARGET = 0.06
_FRAMEWORKS = ("torch", "tensorflow", "keras", "jax")


def seconds(code: str, environment: dict[str, str]) -> float:
    """Wall time of a fresh interpreter that runs `code`."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    return time.perf_counter() - start


def measure(runs: int) -> dict[str, list[float]]:
    """Code -> wall times in seconds, one interpreter of each in turn."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": cache}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        times: dict[str, list[float]] = {BARE: [], IMPORTED: []}
        for code in times:
            seconds(code, environment)
        for _ in range(runs):
            for code, found in times.items():
                found.append(seconds(code, environment))
    return times


def imported_frameworks() -> int:
    """How many frameworks `import polyamp` leaves in `sys.modules`."""
    code = f"import sys, polyamp; print(sum(name in sys.modules for name in {_FRAMEWORKS}))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return int(done.stdout)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments, settings = paired_timing.parse(parser)
    environment = results.machine()
    print(results.heading(environment, {"rounds": settings.rounds}) + "\n", flush=True)
    times = measure(settings.rounds)
    over = [own - bare for own, bare in zip(times[IMPORTED], times[BARE], strict=True)]
    entries = [
        Entry(section="targets", name="import over bare Python", unit="s", own=Side("polyamp", over), target=_TARGET),
        Entry(
            section="targets",
            name="frameworks imported with it",
            unit="",
            own=Side("polyamp", [float(imported_frameworks())]),
            target=0.0,
        ),
    ]
    paired_timing.finish(entries, environment, settings, __file__, arguments.json)


if __name__ == "__main__":
    main()

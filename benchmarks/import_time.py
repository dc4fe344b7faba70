"""Measures `import polyamp` against a bare interpreter, interleaved; prints both medians and the difference.

Run by hand and by `make bench`. Bytecode is compiled first, into a folder of its own, as installing a wheel does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

BARE, IMPORTED = "pass", "import polyamp"


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


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=31, help="interpreters of each kind (default: %(default)s)")
    times = measure(parser.parse_args().runs)
    for code, found in times.items():
        quartiles = statistics.quantiles(found, n=4)
        spread = f"quartiles {quartiles[0] * 1e3:.1f} to {quartiles[2] * 1e3:.1f}"
        print(f"{code:16} {statistics.median(found) * 1e3:6.1f} ms  ({spread})")
    difference = statistics.median(times[IMPORTED]) - statistics.median(times[BARE])
    print(f"{'difference':16} {difference * 1e3:6.1f} ms")


if __name__ == "__main__":
    main()

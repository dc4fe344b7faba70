"""`python -m tests.parity.held_out`: faults and clean pairs that are not looked at while the rules are mended.

    python -m tests.parity.held_out --half E [--log FILE] [--seconds S] [--only WORDS] [--kept FOLDER] [--write]

Before a fault was run it was written down where it must be named and as what. `--log` keeps a line of JSON for each, so
that a run that was cut off after `--seconds` goes on; `--kept` keeps the traces, which are judged anew when a folder
has them. Half A is for mending, half B was for one end, parts C, D and E, which were written apart, each for a later
one; `--list` says how many there are, and not which. `--write` puts the log's table into
docs/measurements/data/parity_faults.md. Not part of `make test`, which runs a few of half A.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "measurements" / "data" / "parity_faults.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", default="", choices=("", *"ABCDE"), help="which part; all if it is left out")
    parser.add_argument("--only", default="", help="those whose words hold this")
    parser.add_argument("--log", type=Path, help="lines of JSON; what it holds is not run again")
    parser.add_argument("--kept", type=Path, help="folder of traces: what is there is judged, the rest is run and kept")
    parser.add_argument("--seconds", type=float, default=1e9, help="when to stop")
    parser.add_argument("--list", action="store_true", help="say how many there are, and run nothing")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    given = parser.parse_args(arguments)
    os.environ.update({"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"})
    import torch  # noqa: F401  # before the others, which otherwise bring an OpenMP of their own

    from tests import xla

    xla.quick()
    from tests.parity.held_out import table
    from tests.parity.held_out.listed import pair_numbers, plant_numbers

    names = [f"f{number}" for number in plant_numbers(given.half)]
    names += [f"c{number}" for number in pair_numbers(given.half)]
    names = [name for name in names if given.only in table.line(name)]
    if given.list:
        print(f"{sum(name[0] == 'f' for name in names)} faults, {sum(name[0] == 'c' for name in names)} clean pairs")
        return 0
    results = _read(given.log)
    warnings.simplefilter("ignore")
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    began = time.monotonic()
    for name in names:
        if name in results:
            continue
        if time.monotonic() - began > given.seconds:
            print("cut off: run it again")
            return 3
        results[name] = _run(name, given.kept)
        print(table.said(name, results[name]), flush=True)
        if given.log is not None:
            with given.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps([name, results[name]]) + "\n")
    chosen = {name: results[name] for name in names}
    print(table.counts(chosen))
    if given.write:
        table.write(PAGE, chosen, given.half)
    return int(not table.hold(chosen))


def _read(log: Path | None) -> dict[str, dict[str, Any]]:
    if log is None or not log.exists():
        return {}
    return dict(json.loads(line) for line in log.read_text(encoding="utf-8").splitlines())


def _run(name: str, folder: Path | None) -> dict[str, Any]:
    from tests.parity.faults.finding import judged, kept
    from tests.parity.held_out import judge
    from tests.parity.held_out.listed import PAIRS, PLANTS

    number, began = int(name[1:]), time.monotonic()
    path = None if folder is None else folder / f"{name}.pkl"
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    try:
        if path is not None and path.exists():
            comparison = judged(path)
        else:
            with kept(path):
                comparison = (
                    judge.planted(PLANTS[number]) if name[0] == "f" else judge.clean(PAIRS[number])
                ).comparisons[0]
    except Exception as error:  # noqa: BLE001  # the table says so
        refused = judge.refused(PLANTS[number], error) if name[0] == "f" else {}
        return {**refused, "error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - began}
    found = judge.of_plant(PLANTS[number], comparison) if name[0] == "f" else judge.of_pair(comparison)
    return {**found, "seconds": time.monotonic() - began}


if __name__ == "__main__":
    sys.exit(main())

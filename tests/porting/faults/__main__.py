"""`python -m tests.porting.faults`: plant one fault after another into models, move them, and see whether it is found.

    python -m tests.porting.faults [--only WORDS] [--clean COUNT] [--write] [--list]

Faults are found by the report's differences, by an error of matching or structure, or by `check=`; what is named is
compared with where the fault is. Then 200 clean pairs are moved, of which nothing may be said. `--write` puts the table
into docs/measurements/data/port_faults.md. Not part of `make test`, which runs a few of them: this takes about half an
hour on one core. The exit status is 1 if fewer than 95 in 100 are found and named, or a clean pair raised an alarm.

Keras is in a process of its own with the others, for TensorFlow's oneDNN and torch's do not bear each other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from tests.porting.faults import clean, table
from tests.porting.faults.listed import FAULTS

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "measurements" / "data" / "port_faults.md"


def _work(keras: bool, only: str, count: int) -> None:
    """What one process does: its share of faults and pairs, a line of JSON each."""
    import torch  # noqa: F401  # before the others, which otherwise bring an OpenMP of their own

    if keras:
        import keras as _  # noqa: F401

    from tests import xla
    from tests.porting.faults.finding import verdict

    xla.quick()

    warnings.simplefilter("ignore")
    for number, fault in enumerate(FAULTS):
        if only in fault.what and ("keras" in (fault.source, fault.target)) == keras:
            try:
                found = verdict(fault)
                said = [found.by, list(found.named), found.right, found.said]
            except Exception as error:  # noqa: BLE001  # the table says so
                said = ["", [], False, f"{type(error).__name__}: {error}"]
            print(json.dumps(["fault", number, *said]), flush=True)
    for number, pair in enumerate(clean.pairs()[:count]):
        if ("keras" in (pair.source, pair.target)) == keras:
            try:
                alarm = clean.alarm(pair)
            except Exception as error:  # noqa: BLE001  # an alarm like another
                alarm = f"{type(error).__name__}: {error}"
            print(json.dumps(["clean", number, alarm]), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant, move, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose words hold this")
    parser.add_argument("--clean", type=int, default=clean.COUNT, help="how many clean pairs")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    parser.add_argument("--worker", choices=["keras", "jax"], help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        _work(given.worker == "keras", given.only, given.clean)
        return 0
    if given.list:
        print("\n".join(f"{each.model:<12} {each.source:>7} -> {each.target:<7}  {each.what}" for each in FAULTS))
        return 0
    results = table.Results()
    for worker in ("keras", "jax"):
        command = [sys.executable, "-m", "tests.porting.faults", "--worker", worker, "--only", given.only]
        quiet = {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}
        with subprocess.Popen(
            [*command, "--clean", str(given.clean)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")]), **quiet},
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(results.take(json.loads(line)), flush=True)
        if process.returncode:
            print(f"the process of {worker} ended with {process.returncode}")
            return 2
    print(results.counts())
    if given.write:
        PAGE.write_text(results.page(), encoding="utf-8")
    return int(not results.hold())


if __name__ == "__main__":
    sys.exit(main())

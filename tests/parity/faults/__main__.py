"""`python -m tests.parity.faults`: plant one fault after another into models and trainings, and compare them.

    python -m tests.parity.faults [--only WORDS] [--clean COUNT] [--jobs N] [--kept FILE] [--write] [--list]

A fault counts as found if the first divergence is in the phase, step, pass and module that were written down before
it was run. Then 200 clean comparisons are made, of which nothing may be said. `--kept` keeps what was seen in a folder
and judges what lies there already, so that tolerances can be tried and a run can be continued; `--write` puts the table
into docs/measurements/data/parity_faults.md. Not part of `make test`, which runs a few of them: this takes more than an
hour on one core. The exit status is 1 if fewer than 95 in 100 are found and named, or a clean comparison raised one.

All frameworks are in one process, where TensorFlow's oneDNN is off: it and torch's do not bear each other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.parity.faults import clean, table
from tests.parity.faults.listed import FAULTS

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "measurements" / "data" / "parity_faults.md"
_QUIET = {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}


def _work(wanted: Sequence[str], folder: Path | None) -> None:
    """What one process does: a line of JSON for each fault and each clean comparison."""
    import logging

    import torch  # noqa: F401  # before the others, which otherwise bring an OpenMP of their own

    from tests import xla

    xla.quick()
    from tests.parity.faults.finding import kept, verdict

    warnings.simplefilter("ignore")
    logging.getLogger("tensorflow").setLevel(logging.ERROR)  # one program after another is traced, as it should be
    for name in wanted:
        number = int(name[1:])
        try:
            with kept(None if folder is None else folder / f"{name}.pkl"):
                if name[0] == "f":
                    made = list(verdict(FAULTS[number]))
                else:
                    report = clean.report(clean.runs()[number])
                    made = list(clean.outcome(report.comparisons[0], report.seconds))
        except Exception as error:  # noqa: BLE001  # the table says so
            made = _failed(name, error)
        print(json.dumps([name, *made]), flush=True)


def _failed(name: str, error: Exception) -> list[Any]:
    said = f"{type(error).__name__}: {error}"
    return [False, False, "", "", said, 0.0, 0.0] if name[0] == "f" else [said, 0.0, 0.0]


def _judged(name: str, path: Path) -> list[Any]:
    """The same of traces that were kept."""
    from tests.parity.faults.finding import judged, said_of

    number = int(name[1:])
    try:
        comparison = judged(path)
    except Exception as error:  # noqa: BLE001  # as above
        return _failed(name, error)
    return list(said_of(FAULTS[number], comparison)) if name[0] == "f" else list(clean.outcome(comparison))


def _run(wanted: Sequence[str], results: table.Results, folder: Path | None, said: threading.Lock) -> int:
    command = [sys.executable, "-m", "tests.parity.faults", "--worker", ",".join(wanted)]
    command += [] if folder is None else ["--kept", str(folder.resolve())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")]), **_QUIET}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("["):
                with said:
                    print(results.take(json.loads(line)), flush=True)
    return process.returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose words hold this")
    parser.add_argument("--clean", type=int, default=clean.COUNT, help="how many clean comparisons")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes")
    parser.add_argument("--kept", type=Path, help="folder of traces: what is there is judged, the rest is run and kept")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        _work(given.worker.split(","), given.kept)
        return 0
    if given.list:
        print("\n".join(map(table.line, FAULTS)))
        return 0
    results = table.Results()
    wanted = [f"f{number}" for number, fault in enumerate(FAULTS) if given.only in table.line(fault)]
    wanted += [f"c{number}" for number in range(given.clean)]
    if given.kept is not None:
        given.kept.mkdir(parents=True, exist_ok=True)
        for name in wanted:
            if (path := given.kept / f"{name}.pkl").exists():
                print(results.take([name, *_judged(name, path)]), flush=True)
    wanted = [name for name in wanted if name not in results.names]
    said, codes = threading.Lock(), []
    threads = [
        threading.Thread(target=lambda part=part: codes.append(_run(part, results, given.kept, said)))
        for part in (wanted[number :: given.jobs] for number in range(given.jobs))
        if part
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if any(codes):
        print(f"processes ended with {codes}")
        return 2
    print(results.counts())
    if given.write:
        PAGE.write_text(results.page(), encoding="utf-8")
    return int(not results.hold())


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tests.porting.public.zoo`: move every pair of the zoo, and judge it.

    python -m tests.porting.public.zoo [--only WORDS ...] [--write] [--list]

Each pair is moved without `check=` and with it, by a reader who writes the lines of `names=` that the errors offer, and
with the lines that the case lists. `--write` writes docs/measurements/data/port_zoo.md. The exit status is 1
if a port was silently wrong, or fewer than 26 in 30 were ported with at most two lines. Not part of `make test`, which
runs a few of them: this takes some minutes on one core.

Keras is in a process of its own with torch, for TensorFlow's oneDNN and torch's do not bear each other.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tests.porting.public.zoo.run import Row, measure
from tests.porting.public.zoo.table import good_enough, line, page

ROOT: Final = Path(__file__).resolve().parents[4]
PAGE: Final = ROOT / "docs" / "measurements" / "data" / "port_zoo.md"
FILES: Final = {
    "jax": ("vision_to_flax", "text_to_flax", "decoders_to_flax", "agents_and_generators", "examples_of_jax"),
    "keras": ("to_keras",),
}
"""Process -> the files that hold its pairs."""


def _work(process: str, only: Sequence[str], listed: bool) -> None:
    """One process's share: a line of JSON for every pair."""
    import torch

    from tests import xla

    xla.quick()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in FILES[process]:
        for case in importlib.import_module(f"tests.porting.public.zoo.{name}").CASES:
            title = f"{case.name}, {case.pair}"
            if only and not any(words in title for words in only):
                continue
            if listed:
                print(json.dumps(title), flush=True)
                continue
            print(json.dumps(dataclasses.asdict(measure(case))), flush=True)


def measured(only: Sequence[str] = (), processes: Sequence[str] = tuple(FILES), listed: bool = False) -> Iterator[Any]:
    """What the processes measured, pair by pair, or with `listed` the pairs' titles."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    paths = [str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TF_ENABLE_ONEDNN_OPTS": "0"}
    for process in processes:
        options = [f"--only={words}" for words in only] + ["--list"] * listed
        command = [sys.executable, "-m", "tests.porting.public.zoo", "--process", process, *options]
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as work:
            assert work.stdout is not None
            for each in (json.loads(line) for line in work.stdout if line.startswith(("{", '"'))):
                yield each if listed else Row.of(each)
        if work.returncode:
            raise SystemExit(f"the process for {process} ended with {work.returncode}")


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.porting.public.zoo")
    parser.add_argument("--only", action="append", default=[], help="pairs whose names hold these words")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--list", action="store_true", help="print the pairs, and move none")
    parser.add_argument("--process", choices=FILES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.process:
        _work(given.process, given.only, given.list)
        return 0
    rows = []
    for each in measured(given.only, listed=given.list):
        print(each if given.list else line(each), flush=True)
        rows.append(each)
    if given.list:
        return 0
    if given.write:
        PAGE.write_text(page(rows), encoding="utf-8")
    return 0 if good_enough(rows) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Networks with and without a flatten in all pairs of libraries with other channel positions: right, or refused."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests import xla
from tests.porting import sequential_models
from tests.porting.flatten_models import cases

ROOT: Final = Path(__file__).parents[2]
PROCESSES: Final = ("torch nnx linen haiku", "torch keras", "equinox nnx")
PAIRS: Final = [(process, *case) for process in PROCESSES for case in cases(process.split())]
REFUSED: Final = "added"
"""Flattened channels and a dense layer's output are one sum."""


@functools.cache
def found(process: str) -> dict[str, Any]:
    """What one process reports of the libraries that are in it."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    if xla.known():
        environment.setdefault("XLA_FLAGS", xla.FLAGS)
    command = [sys.executable, "-W", "ignore", "-m", "tests.porting.flatten_models", *process.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize(("process", "kind", "source", "target"), PAIRS)
def test_s30_rows_are_in_the_order_of_the_flatten_or_refused(process: str, kind: str, source: str, target: str) -> None:
    """On other inputs than those that the port saw."""
    everything, key = found(process), f"{kind} {source} {target}"
    assert "error" in everything[f"{key} bare"], everything[f"{key} bare"]
    record = everything[f"{key} check"] if f"{key} check" in everything else everything[f"{key} batch"]
    if kind == REFUSED:
        assert "rows, perhaps in the order of" in record["error"]
    else:
        assert record.get("distance", 1.0) < 1e-5, record
        assert record["clean"]


@pytest.mark.parametrize(
    ("process", "source", "target"), [(key, *pair) for key, pairs in sequential_models.PAIRS.items() for pair in pairs]
)
def test_s30_a_flatten_between_modules_of_both_graphs_needs_no_batch(process: str, source: str, target: str) -> None:
    record = found(process)[f"{source} to {target}"]
    if "hidden" in source:
        assert "nothing proves whether these layers stand next to a flatten" in record["error"]
        return
    assert record["distance"] < 1e-5, record
    assert record["clean"]
    assert [note.partition(":")[2] for note in record["notes"]] == (
        []
        if "turned" in target
        else [
            f" rows 0:96 put from {'(4, 24) to (24, 4)' if source in sequential_models.FIRST else '(24, 4) to (4, 24)'}"
            " (both graphs of modules show it)"
        ]
    )

"""`polyamp.compare` of three programs that are not of this project: they agree, and a mistake in each is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parents[3]
PROGRAMS: Final = ("GPT-2", "ResNet", "LSTM tagger")
MISTAKES: Final = {
    ("GPT-2", "gelu"): ([1, "forward", "transformer/h/0/mlp/c_proj", "input", "", "formula"], ""),
    ("ResNet", "decay on norms"): (
        [1, "update", "resnet/embedder/embedder/normalization", "parameter", "scale", "formula"],
        "in torch, 0.0001 in jax; the others have the same",
    ),
    ("LSTM tagger", "mean over padding"): ([1, "forward", "", "loss", "", "factor"], "loss: 1.6"),
}
"""Program, mistake -> step, pass, module, quantity, array, kind; a part of the evidence."""


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    paths = [str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")]
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.parity.public", "--quick"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    read: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return read


@pytest.mark.parametrize("program", PROGRAMS)
def test_two_frameworks_train_it_alike(program: str, found: dict[str, dict[str, Any]]) -> None:
    policies = {name: each for name, each in found[program].items() if (program, name) not in MISTAKES}
    assert policies
    for policy, each in policies.items():
        assert each["agrees"], (policy, each)
        assert set(each["share"]) == {"float32", policy}
        assert all(0 < share < 0.7 for share in each["share"].values()), (policy, each)


@pytest.mark.parametrize(("program", "mistake"), MISTAKES)
def test_a_mistake_is_named(program: str, mistake: str, found: dict[str, dict[str, Any]]) -> None:
    first, evidence = MISTAKES[program, mistake]
    each = found[program][mistake]
    assert not each["agrees"]
    assert each["first"] == first
    assert any(evidence in line for line in each["evidence"]), each["evidence"]

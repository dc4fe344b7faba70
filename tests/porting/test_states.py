"""A run that is stopped in one framework goes on in another: the same scales, and losses within S21.

Each framework trains in a process of its own (`python -m tests.porting.states FRAMEWORK FOLDER`), at the same time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.porting.states import models

ROOT = Path(__file__).parents[2]
PAIRS = [(source, target) for target, sources in models.SOURCES.items() for source in sources]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """ "torch-adamw" -> the whole run; "torch>linen-adamw" -> what linen made of its second half."""
    folder = tmp_path_factory.mktemp("states")
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    errors = [folder / f"{name}.err" for name in models.BUILD]
    running = []
    for name, error in zip(models.BUILD, errors, strict=True):
        command = [sys.executable, "-m", "tests.porting.states", name, str(folder)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with error.open("w") as said:
            running.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=said, **pipes))  # type: ignore[call-overload]  # a dict
    found: dict[str, Any] = {}
    for process, error in zip(running, errors, strict=True):
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, error.read_text()
        found |= json.loads(line)
    for process, error in zip(running, errors, strict=True):
        out, _ = process.communicate("go\n", timeout=300)
        assert process.returncode == 0, error.read_text()
        found |= json.loads(out)
    return found


def distance(one: Any, other: Any) -> float:
    """The largest distance of two curves, relative to the larger loss at that step."""
    a, b = np.asarray(one), np.asarray(other)
    return float(np.max(np.abs(a - b) / np.maximum(np.abs(a), np.abs(b))))


def calm(run: Any, start: int = 0) -> list[float]:
    """The losses of the steps that are applied, from step `start` on; the run ends with the last."""
    first = models.STEPS - len(run["loss"])
    return [run["loss"][number - first] for number in models.CALM if number >= start]


@pytest.mark.parametrize("recipe", models.RECIPES)
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_stopped_run_goes_on_elsewhere(runs: dict[str, Any], source: str, target: str, recipe: str) -> None:
    whole, rest, stop = runs[f"{source}-{recipe}"], runs[f"{source}>{target}-{recipe}"], models.STOP
    assert rest["moved"] == 6
    assert rest["recipe"] == []
    assert rest["step"] == models.STEPS - len(models.OVERFLOWS)
    assert rest["scale"] == whole["scale"][stop:]
    assert rest["skipped"] == whole["skipped"][stop:]
    wide = runs[f"float32-{recipe}"]["loss"]
    own = [distance(calm(runs[f"{name}-{recipe}"]), wide) for name in (source, target)]
    assert all(0.0 < each < 0.01 for each in own), own
    assert distance(calm(whole, stop), calm(rest, stop)) <= 2.0 * max(*own, 3e-4)
    assert len(rest["averages"]) == len(whole["averages"]) == (0 if models.RECIPES[recipe].ema is None else 13)
    np.testing.assert_allclose(rest["averages"], whole["averages"], rtol=0.02, atol=0.01)


@pytest.mark.parametrize("recipe", models.RECIPES)
def test_the_runs_are_worth_comparing(runs: dict[str, Any], recipe: str) -> None:
    scales = runs[f"torch-{recipe}"]["scale"]
    assert max(scales) == models.SCALER.max_scale
    assert len(set(scales)) > 3
    skipped = [number for number, was in enumerate(runs[f"torch-{recipe}"]["skipped"]) if was]
    assert tuple(skipped) == models.OVERFLOWS
    losses = runs[f"torch-{recipe}"]["loss"]
    assert losses[-1] < 0.8 * losses[0]

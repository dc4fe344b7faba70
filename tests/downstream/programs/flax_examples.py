"""flax: the toy examples of nnx that train, as scripts."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(os.environ["DOWNSTREAM_SOURCE"]) / "examples" / "nnx_toy_examples"
SCRIPTS = ("03_train_state", "04_data_parallel_with_jit", "07_array_leaves", "10_fsdp_and_optimizer")


@pytest.mark.parametrize("name", SCRIPTS)
def test_loss_falls(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    np.random.seed(0)  # noqa: NPY002  # the scripts draw their data by it
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="nnx_example")
    losses = [float(found) for found in re.findall(r"(?i)loss\s*[:=]\s*([\d.e+-]+)", capsys.readouterr().out)]
    assert len(losses) >= 2
    assert losses[-1] < 0.02  # the data's noise has a variance of 0.01
    assert losses[-1] < losses[0]

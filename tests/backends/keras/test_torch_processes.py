"""Keras on torch in two processes: `DistributedDataParallel` in a loop of one's own; `fit` is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np


def test_processes_skip_together_in_a_loop_and_fit_is_refused(tmp_path: Path) -> None:
    program = Path(__file__).with_name("torch_process.py")
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], printed
    one, other = (np.load(tmp_path / f"{rank}.npz") for rank in range(2))
    for found in (one, other):
        assert found["numbers"].tolist() == [32.0, 1, 2]
        assert len(found["refusals"]) == 2
        assert all("torch.distributed with 2 processes" in text for text in found["refusals"])
        assert all("DistributedDataParallel" in text for text in found["refusals"])
    trained = one["trained"]
    for number, trains in enumerate(trained):
        name = f"variable_{number}"
        assert np.isfinite(other[name]).all()  # BatchNorm's means too, from before the step
        assert np.array_equal(one[name], other[name]) == trains  # each process has the statistics of its own rows

"""`examples/distributed`: one recipe and one loss on every framework's engine, and the curves are those of one replica.

The float32 losses of one replica, which three frameworks agree on within S21, stand here.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import ranks

FOLDER = Path(__file__).parents[2] / "examples" / "distributed"
FLOAT32 = [2.350381, 1.776633, 1.178685, 0.760241, 0.503455, 0.499969, 0.586610]
"""Of steps 0, 10, ..., 50 and 59."""
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}


def curve(printed: str) -> list[float]:
    """The losses of a program, which trained well and skipped nothing."""
    assert re.search(r": scale 65536, skipped 0, accuracy 0\.9\d\d\n", printed), printed
    return [float(loss) for loss in re.findall(r"^step +\d+  loss (\d+\.\d+)$", printed, re.MULTILINE)]


def apart(one: Sequence[float]) -> float:
    """The largest relative distance from the float32 curve of one replica."""
    assert len(one) == len(FLOAT32)
    return float(np.max(np.abs(np.subtract(one, FLOAT32)) / FLOAT32))


def begun(command: Sequence[str]) -> subprocess.Popen[str]:
    """A program of the folder, as a user starts it."""
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *command], stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT)


def ended(process: subprocess.Popen[str]) -> str:
    """What it printed."""
    try:
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A program of the folder in this process."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.syspath_prepend(FOLDER)
        monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # put back what the program sets
        runpy.run_path(str(FOLDER / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def as_a_rank(rank: int, *arguments: str) -> str:
    """The torch program on a rank that is there already."""
    import torch.distributed as dist

    sys.argv = ["with_torch.py", *arguments]
    sys.path.insert(0, str(FOLDER))
    dist.init_process_group = lambda backend: None  # type: ignore[assignment, method-assign, unused-ignore]  # it is there
    dist.destroy_process_group = lambda: None  # type: ignore[assignment, method-assign, unused-ignore]  # the ranks do it
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(FOLDER / "with_torch.py"), run_name="__main__")
    return printed.getvalue() if rank == 0 else ""


def test_s09_replicas_train_as_one_does(framework: str, run_here: Callable[..., str]) -> None:
    if framework == "torch":
        mixed = begun(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", f"{FOLDER}/with_torch.py"])
        for arguments, world in ((["--fsdp"], 2), ([], 2), ([], 1)):
            printed, *_ = ranks.run(as_a_rank, world, "--policy", "float32", *arguments, collective_timeout=60.0)
            assert apart(curve(printed)) < 2.5e-5, (arguments, world)
        assert apart(curve(ended(mixed))) < 5e-3
    elif framework == "jax":
        with socket.socket() as free:
            free.bind(("localhost", 0))
            where = f"localhost:{free.getsockname()[1]}"
        two = ["--replicas", "4", "--shard", "--policy", "float32", "--coordinator", where, "--processes", "2"]
        several = [begun([f"{FOLDER}/with_jax.py", *two, "--process", str(process)]) for process in range(2)]
        assert apart(curve(run_here("with_jax.py", "--replicas", "1", "--policy", "float32"))) < 2.5e-5
        first, _ = [ended(process) for process in several]
        assert apart(curve(first)) < 2.5e-5
    else:
        mixed = begun([f"{FOLDER}/with_tensorflow.py", "--replicas", "2", "--steps", "60"])
        assert apart(curve(ended(mixed))) < 5e-3


def blocks(framework: str) -> list[str]:
    """The guide's blocks of a framework."""
    text = (FOLDER.parents[1] / "docs" / "guides" / "from_one_device_to_many.md").read_text(encoding="utf-8")
    return re.findall(rf"^```python {framework}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def the_blocks(rank: int) -> tuple[bool, float]:
    """torch's blocks on a rank."""
    scope: dict[str, Any] = {"__name__": "guide"}
    for block in blocks("torch"):
        exec(compile(block, "from_one_device_to_many.md", "exec"), scope)
    return bool(scope["result"].skipped), float(scope["result"].loss)


def test_s09_the_guides_blocks_run(framework: str) -> None:
    if framework == "torch":
        first, second = ranks.run(the_blocks, 2, collective_timeout=60.0)
        assert first == second
        assert not first[0]
    else:
        (block,) = blocks(framework)
        scope: dict[str, Any] = {"__name__": "guide"}
        exec(compile(block, "from_one_device_to_many.md", "exec"), scope)
        assert not scope["result"].skipped
        assert 0.5 < float(scope["result"].loss) < 5.0


def test_the_commands_are_those_of_the_programs() -> None:
    """In the guide."""
    programs = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("with_*.py")}
    assert len(programs) == 3
    text = (FOLDER.parents[1] / "docs" / "guides" / "from_one_device_to_many.md").read_text(encoding="utf-8")
    found = re.findall(
        r"^((?:torchrun|python) .*?examples/distributed/(with_\w+\.py)[^#\n]*?) *(?:#.*)?$", text, re.MULTILINE
    )
    assert {name for _, name in found} == set(programs)
    assert [command for command, name in found if f"\n{command}\n" not in programs[name]] == []

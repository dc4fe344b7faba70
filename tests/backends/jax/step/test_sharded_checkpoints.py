"""Rule S33 in JAX: what two processes save from a mesh of four devices goes on on four, on two and on one."""

from __future__ import annotations

import builtins
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.errors import BackendNotInstalledError

WORKER = Path(__file__).parents[3] / "fixtures" / "jax_checkpoints.py"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def said_by_two(folder: Path) -> list[Any]:
    port = str(free_port())
    commands = [[sys.executable, str(WORKER), "save", str(folder), str(rank), port] for rank in range(2)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, **pipes) for command in commands]  # type: ignore[call-overload]
    try:
        ended = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(error for _, error in ended)
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


def test_s33_two_processes_go_on_bit_identically(said_by_two: list[Any], folder: Path) -> None:
    assert [len(said) for said in said_by_two] == [1, 1], "nothing parted; one error of a restore that one refused"
    assert all(said.startswith("CheckpointError: rank 1 finds nothing at ") for (said,) in said_by_two)
    said = json.loads((folder / "folder" / "polyamp.json").read_text())
    assert (said["processes"], said["own"]) == (2, [])
    assert said["arrays"]["model/up"] == ["float32", [4, 8]]
    assert any("ocdbt.process_1" in name for name in said["files"]), "the second process wrote what it holds"
    assert (folder / "file").is_file()


def test_s33_other_meshes_and_one_device_take_it(said_by_two: list[Any], folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, WORKER, "resume", folder], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("default") == [True, True], "one process writes a file unless told otherwise"
    assert found.pop("alone") == []
    assert set(found) == {f"{count} {form}" for count in (4, 2, 1) for form in ("folder", "file")}
    for name, (parted, kept, gone_on) in found.items():
        assert parted == [], name
        assert kept, name
        assert gone_on < 1e-3, name  # float16, in another order of sums


def test_s33_without_orbax_the_command_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("orbax"):
            raise ImportError(name)
        return imported(name, *args, **kwargs)

    def apply(params: Any, x: Any) -> Any:
        return x @ params["w"]

    made = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
    state = polyamp.init((apply, {"w": np.ones((2, 2), np.float32)}), made, backend="jax")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(BackendNotInstalledError, match=r'pip install "polyamp\[sharded\]"'):
        polyamp.save(state, tmp_path / "checkpoint", sharded=True)
    assert list(tmp_path.iterdir()) == []
    polyamp.save(state, tmp_path / "checkpoint")

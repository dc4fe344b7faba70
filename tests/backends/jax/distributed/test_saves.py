"""Rule S33 in two JAX processes on loopback: who calls `save`, and what each says of one that is not whole."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.backends.jax.distributed import two_saves

ROOT = Path(__file__).parents[4]


def test_s33_one_process_saves_what_all_hold_and_every_process_refuses_what_one_refuses(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    flags = " ".join(f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f)
    started = [
        subprocess.Popen(
            [sys.executable, "-m", two_saves.__name__, str(number), port, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        )
        for number in range(2)
    ]
    try:
        ends = [process.communicate(timeout=150) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0, -9], "\n".join(said[-2000:] for _, said in ends)
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in ends)
    for found in (first, second):
        assert (found["alone"], found["every"], found["loss"]) == (True, True, first["loss"])
        assert found["kinds"] == [False, False, True]
        short, nowhere, apart = found["refused"]
        assert short.startswith("CheckpointError: ")
        assert f"/{first['lost']} is missing. Restore an older one." in short
        assert nowhere.startswith("FileNotFoundError: ")
        assert apart.startswith(f"CheckpointError: rank 1 finds nothing at {tmp_path}/nowhere, and rank 0 a folder at ")
    assert first["killed"].startswith("process 1 ended, raised or was killed: a collective of process 0 failed")
    assert "(In polyamp.save; the last complete checkpoint is whole.)" in first["killed"]

"""Two processes with `jax.distributed` on loopback, two devices each, train one state (S9)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

import polyamp
from tests.backends.jax.distributed import two_processes
from tests.backends.jax.distributed.meshes import loss_fn, whole_batch

ROOT = Path(__file__).parents[4]


def test_s09_two_processes_equal_one() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    flags = " ".join(f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f)
    started = [
        subprocess.Popen(
            [sys.executable, "-m", two_processes.__name__, str(number), port],
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
    assert [process.returncode for process in started] == [0, 0], "\n".join(said[-2000:] for _, said in ends)
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in ends)
    alone = polyamp.init((two_processes.apply_fn, two_processes.parameters()), two_processes.RECIPE, backend="jax")
    step = polyamp.train_step(loss_fn, two_processes.RECIPE)
    losses, skipped = [], []
    for at in range(two_processes.STEPS):
        alone, result = step(alone, whole_batch(at, poisoned=two_processes.POISONED.get(at)))
        losses.append(float(result.loss))
        skipped.append(bool(result.skipped))
    for name in ("skipped", "losses", "scale", "norm", "kept", "programs", "b", "stuck"):
        assert first[name] == second[name], name
    assert (first["skipped"], first["scale"]) == (skipped, float(result.scale))
    assert (first["kept"], first["programs"]) == (True, 1)
    np.testing.assert_allclose(first["losses"], losses, rtol=2e-3)
    assert "'w'" in first["stuck"] or " w" in first["stuck"], first["stuck"]
    rows = {**first["w"], **second["w"]}
    whole = np.concatenate([rows[str(start)] for start in range(4)])
    np.testing.assert_allclose(whole, np.asarray(alone.params["w"]), rtol=2e-3, atol=2e-4)

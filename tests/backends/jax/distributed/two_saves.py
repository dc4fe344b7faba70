"""What one of two processes runs: `python -m ... NUMBER PORT FOLDER`; they save and restore. For `test_saves`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import polyamp
from polyamp.errors import CheckpointError, ReplicaError
from polyamp.train import checkpoint

RECIPE = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.adamw(1e-2))


def apply_fn(params: Any, x: Any) -> Any:
    return x @ params["w"] + params["b"]


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch), 0.0 * batch[:, :3])


def whole(state: Any) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in state.backend.export_state(state).items()}


def main(number: int, port: str, folder: str) -> dict[str, Any]:
    """What this process saw."""
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, number, initialization_timeout=60)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    batch = jax.make_array_from_process_local_data(rows, np.ones((2, 4), np.float32))
    step = polyamp.train_step(loss_fn, RECIPE)

    def fresh(place: Any, seed: int) -> Any:
        drawn = np.random.default_rng(seed).normal(size=(4, 3)).astype(np.float32)
        params = {"w": jax.device_put(drawn, place), "b": jax.device_put(np.zeros(3, np.float32), everywhere)}
        return polyamp.init((apply_fn, params), RECIPE)

    found: dict[str, Any] = {}
    state, _ = step(fresh(everywhere, 0), batch)
    saved = whole(state)
    if number == 0:  # and the other one goes on
        polyamp.save(state, f"{folder}/alone")
    state, result = step(state, batch)
    found["loss"] = float(result.loss)
    polyamp.save(state, f"{folder}/every")
    _, arrays = checkpoint.read(f"{folder}/every")
    found["every"] = {name: array.tobytes() for name, array in arrays.items()} == whole(state)
    found["alone"] = whole(polyamp.restore(fresh(everywhere, 1), f"{folder}/alone")) == saved

    state = fresh(rows, 0)
    polyamp.save(state, f"{folder}/shards")
    found["kinds"] = [Path(folder, name).is_dir() for name in ("alone", "every", "shards")]
    if number == 0:
        lost = sorted(file for file in Path(folder, "shards").glob("data-*/**/*") if file.is_file())[1]
        found["lost"] = lost.name
        lost.unlink()
    multihost_utils.sync_global_devices("lost")
    for name in ("shards", "nowhere", "nowhere" if number else "shards"):
        try:
            polyamp.restore(state, f"{folder}/{name}")
        except (CheckpointError, FileNotFoundError) as error:
            found.setdefault("refused", []).append(f"{type(error).__name__}: {error}")
    print(json.dumps(found), flush=True)
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        polyamp.save(state, f"{folder}/next", sharded=False)
    except ReplicaError as error:
        found["killed"] = str(error)
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), sys.argv[2], sys.argv[3])), flush=True)
    os._exit(0)  # not through JAX's own end, which waits for the process that was killed

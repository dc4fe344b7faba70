"""What one of two processes runs: `python -m ... NUMBER PORT`; two devices in each. Started by `test_processes`."""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import polyamp
from polyamp.errors import LossScaleStuckError
from tests.backends.jax.distributed.meshes import loss_fn, whole_batch

STEPS = 12
POISONED = {3: 2, 6: 13, 9: 7}
"""Step -> row of the whole batch that overflows: in either process."""
RECIPE = polyamp.Recipe(
    policy="mixed_float16",
    optimizer=polyamp.adamw(1e-2, eps=1e-3),
    scaler=polyamp.LossScaler(init_scale=2.0**10, growth_interval=2),
    clip_norm=0.5,
)


def parameters() -> Any:
    rng = np.random.default_rng(0)
    return {"w": rng.normal(size=(4, 3)).astype(np.float32), "b": np.zeros(3, np.float32)}


def apply_fn(params: Any, x: Any) -> Any:
    return x @ params["w"] + params["b"]


def main(number: int, port: str) -> dict[str, Any]:
    """Train, and say what this process saw."""
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, number, initialization_timeout=60)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    host = parameters()
    params = {name: jax.device_put(host[name], place) for name, place in (("w", rows), ("b", everywhere))}
    state = polyamp.init((apply_fn, params), RECIPE)
    places = [leaf.sharding for leaf in jax.tree.leaves(state)]
    step = polyamp.train_step(loss_fn, RECIPE)
    skipped, losses = [], []
    for at in range(STEPS):
        whole = whole_batch(at, poisoned=POISONED.get(at))
        own = {name: array[8 * number : 8 * number + 8] for name, array in whole.items()}
        batch = {name: jax.make_array_from_process_local_data(rows, array) for name, array in own.items()}
        state, result = step(state, batch)
        skipped.append(bool(result.skipped))
        losses.append(float(result.loss))
    found = {
        "skipped": skipped,
        "losses": losses,
        "scale": float(result.scale),
        "norm": float(result.grad_norm),
        "kept": [leaf.sharding for leaf in jax.tree.leaves(state)] == places,
        "programs": step._run["jax"]._call._cache_size(),  # type: ignore[attr-defined]
        "b": np.asarray(state.params["b"]).tolist(),
        "w": {str(shard.index[0].start or 0): shard.data.tolist() for shard in state.params["w"].addressable_shards},
    }
    found["stuck"] = stuck(params, batch)
    jax.distributed.shutdown()
    return found


def stuck(params: Any, batch: Any) -> str:
    """What a step says whose scale cannot go down any more (S17); the gradients that it names lie in both processes."""
    recipe = RECIPE.replace(scaler=polyamp.LossScaler(init_scale=1.0, min_scale=1.0, patience=2))
    state = polyamp.init((apply_fn, params), recipe)
    step = polyamp.train_step(lambda model, batch: loss_fn(model, batch) * float("inf"), recipe)
    try:
        for _ in range(3):
            state, _ = step(state, batch)
    except LossScaleStuckError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), sys.argv[2])))

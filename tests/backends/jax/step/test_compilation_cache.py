"""JAX's persistent compilation cache: a second process finds every program of `init` and of a step that the first left.

A key is the program's text, so nothing in it may depend on the process: no address, no order of a set (the hash seed
differs between the two), no line of the user's file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

import polyamp

counts = Counter()
jax.monitoring.register_event_listener(lambda name, **_: counts.update([name.rpartition("/")[2]]))


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.relu(linen.BatchNorm(use_running_average=False)(linen.Dense(8, name="first")(x)))
        return linen.Dense(3, name="head")(linen.Dropout(0.5, deterministic=False)(x))


class Whole(nnx.Module):
    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(self.first(x)))


def loss_fn(model, batch):
    outputs = model(batch["x"])
    return polyamp.losses.mean_squared_error(outputs, batch["y"]), {"mean": outputs.mean()}


batch = {"x": np.ones((8, 4), np.float32), "y": np.zeros((8, 3), np.float32)}
net, keys = Net(), {"params": jax.random.key(0), "dropout": jax.random.key(1)}
linen_model, nnx_model = (net, net.init(keys, jnp.ones((8, 4)))), Whole(nnx.Rngs(0))
counts.clear()
groups = [*polyamp.no_decay("bias", "norm"), polyamp.Group("head/**", learning_rate_scale=0.1)]
recipe = polyamp.Recipe(
    policy=polyamp.Policy("mixed_float16", overrides={"head": "float32"}),
    optimizer=polyamp.adamw(1e-3, groups=groups),
    clip_norm=1.0,
    accumulate_steps=2,
)
state, step = polyamp.init(linen_model, recipe, rngs={"dropout": keys["dropout"]}), polyamp.train_step(loss_fn, recipe)
for _ in range(2):
    state, result = step(state, batch)
recipe = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.sgd(0.1, momentum=0.9))
state = polyamp.init(nnx_model, recipe)
for _ in range(2):
    _, gradients = polyamp.value_and_grad(loss_fn)(state, batch)
    state, result = polyamp.apply_gradients(state, gradients)
jax.block_until_ready(state)
print(json.dumps({name: counts[name] for name in ("cache_hits", "cache_misses")}))
"""


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    def run(seed: int) -> dict[str, int]:
        environment = {
            **os.environ,
            "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "PYTHONHASHSEED": str(seed),
        }
        program = [sys.executable, "-c", "\n" * seed + PROGRAM]
        done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        counts: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
        return counts

    first, second = run(1), run(2)
    assert first["cache_misses"] > 4, "init's, the step's, and both halves'"
    assert second == {"cache_hits": sum(first.values()), "cache_misses": 0}

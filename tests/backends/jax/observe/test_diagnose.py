"""`polyamp.diagnose` on a planted module whose arithmetic does not fit float16: exactly this one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import polyamp


class Hot(nnx.Module):
    """Passes 65504 on the way to an output of usual size, in a product: elementwise, XLA computes in float32."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return (x * 300.0) @ (300.0 * jnp.eye(16)) / 300.0 / 300.0


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, *, hot: bool) -> None:
        self.norm, self.up, self.down = (
            nnx.LayerNorm(16, rngs=rngs),
            nnx.Linear(16, 32, rngs=rngs),
            nnx.Linear(32, 16, rngs=rngs),
        )
        self.extra = Hot() if hot else None

    def __call__(self, x: jax.Array) -> jax.Array:
        inner = self.down(jax.nn.gelu(self.up(self.norm(x))))
        return x + (inner if self.extra is None else self.extra(inner))


class Network(nnx.Module):
    def __init__(self, blocks: int, hot: Sequence[int]) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(16, 16, rngs=rngs)
        self.blocks = nnx.List([Block(rngs, hot=number in hot) for number in range(blocks)])
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"])


def test_the_planted_module_is_found() -> None:
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=(32, 16)).astype(np.float32) for _ in range(8)]
    batches = [{"x": x, "y": x[:, :4].argmax(-1)} for x in rows]
    recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.adamw(3e-3))
    report = polyamp.diagnose(Network(3, [1]), loss_fn, batches, recipe)
    assert report.sensitive == ["blocks/1/extra"], str(report)
    assert len(report.trials) <= 2 + 2 * np.log2(len(report.modules))

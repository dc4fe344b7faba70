"""A monitor names an embedding whose gradient underflows (S35)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import polyamp


class Words(nnx.Module):
    """The mean of 4,096 embeddings: each row has a 4,096th of the gradient."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(4096, 8, embedding_init=nnx.initializers.normal(1.0), rngs=rngs)
        self.head = nnx.Linear(8, 4, rngs=rngs)
        self.head.bias[...] = jnp.full((4,), 0.3)

    def __call__(self, words: jax.Array) -> jax.Array:
        return self.head(self.embed(words).mean(1))


def small_loss(model: Any, words: Any) -> jax.Array:
    return jnp.square(model(words)).mean() * 2e-4


def test_s35_an_embedding_whose_gradient_underflows_is_named() -> None:
    """Below 2^-24 at a loss scale of 1, where the head's gradients are not."""
    lost = []
    for scale in (1.0, 2.0**16):
        scaler = polyamp.LossScaler.static(scale)
        recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.sgd(0.1), scaler=scaler)
        monitor = polyamp.Monitor(every=1)
        step = polyamp.train_step(small_loss, recipe, monitor=monitor)
        step(polyamp.init(Words(), recipe), jnp.arange(4096)[None])
        found = {row.module: row.gradients for row in monitor.records[0].modules}
        lost.append({name: each.zero + each.underflow for name, each in found.items() if each is not None})
    assert lost[0]["embed"] > 0.9
    assert lost[0]["head"] < 0.2
    assert lost[1] == {"embed": 0.0, "head": 0.0}

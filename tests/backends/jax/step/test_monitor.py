"""A monitor names an embedding whose gradient underflows (S35)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import polyamp
from tests.fixtures.embedding_underflow import LOSS_FACTOR, ROWS, check_embedding_underflow


class Words(nnx.Module):
    """The mean of 4,096 embeddings: each row has a 4,096th of the gradient."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(ROWS, 8, embedding_init=nnx.initializers.normal(1.0), rngs=rngs)
        self.head = nnx.Linear(8, 4, rngs=rngs)
        self.head.bias[...] = jnp.full((4,), 0.3)

    def __call__(self, words: jax.Array) -> jax.Array:
        return self.head(self.embed(words).mean(1))


def small_loss(model: Any, words: Any) -> jax.Array:
    return jnp.square(model(words)).mean() * LOSS_FACTOR


def test_s35_an_embedding_whose_gradient_underflows_is_named() -> None:
    check_embedding_underflow(Words, small_loss, jnp.arange(ROWS)[None])


def test_s35_a_scan_counts_skipped_steps() -> None:
    """A run in which every step is skipped has its records, the last of them sinking, as calls one by one have."""
    recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.sgd(0.1))
    bad = np.full((20, 4, 8), np.inf, np.float32)

    def loss_fn(model: Any, x: Any) -> jax.Array:
        return jnp.square(model(x)).mean()

    seen = []
    for in_scan in (True, False):
        monitor, state = polyamp.Monitor(every=5), polyamp.init(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), recipe)
        step = polyamp.train_step(loss_fn, recipe, monitor=monitor, compile=not in_scan)
        if in_scan:
            state, results = jax.jit(lambda state, batch, step=step: jax.lax.scan(step, state, batch))(state, bad)
            monitor.read(state, results)
        else:
            for x in bad:
                state, _ = step(state, x)
        seen.append([(each.call, each.skipped, each.scale, each.word) for each in monitor.records])
    assert [call for call, *_ in seen[0]] == [5, 10, 15, 20]
    assert seen[0] == seen[1]
    assert seen[0][-1][-1] == "sinking"

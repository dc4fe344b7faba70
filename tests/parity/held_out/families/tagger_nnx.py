"""A tagger over a recurrent layer of either direction, in flax nnx."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

WIDTH, UNITS, WORDS, TAGS = 12, 8, 31, 7


class Cell(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.inputs = nnx.Linear(WIDTH, 3 * UNITS, rngs=rngs)
        self.gates = nnx.Linear(UNITS, 2 * UNITS, use_bias=False, rngs=rngs)
        self.candidate = nnx.Linear(UNITS, UNITS, rngs=rngs)

    def __call__(self, x: Any, h: Any) -> Any:
        r_in, z_in, n_in = jnp.split(self.inputs(x), 3, -1)
        r_h, z_h = jnp.split(self.gates(h), 2, -1)
        r, z = jax.nn.sigmoid(r_in + r_h), jax.nn.sigmoid(z_in + z_h)
        n = jnp.tanh(n_in + r * self.candidate(h))
        return (1.0 - z) * n + z * h


class Model(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.embed, self.forwards, self.backwards = nnx.Embed(WORDS, WIDTH, rngs=rngs), Cell(rngs), Cell(rngs)
        self.norm = nnx.LayerNorm(2 * UNITS, epsilon=1e-5, rngs=rngs)
        self.head = nnx.Linear(2 * UNITS, TAGS, rngs=rngs)

    def __call__(self, batch: Any) -> Any:
        x = self.embed(batch["tokens"])
        length = x.shape[1]
        ahead, behind = [], []
        h = jnp.zeros((len(x), UNITS), x.dtype)
        for place in range(length):
            h = self.forwards(x[:, place], h)
            ahead.append(h)
        h = jnp.zeros((len(x), UNITS), x.dtype)
        for place in reversed(range(length)):
            h = self.backwards(x[:, place], h)
            behind.insert(0, h)
        states = jnp.concatenate([jnp.stack(ahead, 1), jnp.stack(behind, 1)], -1)
        return self.head(self.norm(states))


def loss_fn(model: Any, batch: Any) -> Any:
    logits, tags = model(batch).astype(jnp.float32), batch["tags"]
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), tags[..., None], -1)[..., 0]
    counted = (tags > 0).astype(jnp.float32)
    return (losses * counted).sum() / counted.sum()

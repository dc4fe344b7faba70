"""A monitor names an embedding whose gradient underflows (S35)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

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

"""An encoder as BERT's, in flax nnx."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

WIDTH, HEADS, WORDS, HIDDEN, LENGTH, CLASSES, BLOCKS, RATE = 16, 2, 29, 32, 6, 5, 2, 0.1


class Embeddings(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.word, self.position = nnx.Embed(WORDS, WIDTH, rngs=rngs), nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.kind, self.norm = nnx.Embed(2, WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, epsilon=1e-12, rngs=rngs)
        self.dropout = nnx.Dropout(RATE, rngs=rngs)

    def __call__(self, tokens: Any, kinds: Any) -> Any:
        x = self.word(tokens) + self.kind(kinds) + self.position(jnp.arange(tokens.shape[1]))
        return self.dropout(self.norm(x))


class Attention(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.query, self.key, self.value, self.dense = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4))

    def __call__(self, x: Any, mask: Any) -> Any:
        q, k, v = (each(x).reshape(*x.shape[:2], HEADS, -1) for each in (self.query, self.key, self.value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (WIDTH // HEADS) ** 0.5
        scores = scores + (1.0 - mask[:, None, None, :]) * -1e4
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(v.dtype), v)
        return self.dense(mixed.reshape(x.shape))


class Layer(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.attention, self.norm1 = Attention(rngs), nnx.LayerNorm(WIDTH, epsilon=1e-12, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, epsilon=1e-12, rngs=rngs)
        self.dropout1, self.dropout2 = nnx.Dropout(RATE, rngs=rngs), nnx.Dropout(RATE, rngs=rngs)

    def __call__(self, x: Any, mask: Any) -> Any:
        x = self.norm1(x + self.dropout1(self.attention(x, mask)))
        return self.norm2(x + self.dropout2(self.down(jax.nn.gelu(self.up(x), approximate=False))))


class Model(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.embeddings, self.layers = Embeddings(rngs), nnx.List([Layer(rngs) for _ in range(BLOCKS)])
        self.pooler, self.classifier = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, batch: Any) -> Any:
        x = self.embeddings(batch["tokens"], batch["kinds"])
        for layer in self.layers:
            x = layer(x, batch["mask"])
        return self.classifier(jnp.tanh(self.pooler(x[:, 0])))


def loss_fn(model: Any, batch: Any) -> Any:
    logits = model(batch).astype(jnp.float32)
    targets = jax.nn.one_hot(batch["labels"], CLASSES) * (1 - 0.1) + 0.1 / CLASSES
    return -(targets * jax.nn.log_softmax(logits)).sum(-1).mean()

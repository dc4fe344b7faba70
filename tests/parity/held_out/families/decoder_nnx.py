"""A decoder as LLaMA's, in flax nnx."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

WIDTH, HEADS, SIZE, WORDS, HIDDEN, BLOCKS = 16, 4, 4, 23, 24, 2


class RMSNorm(nnx.Module):
    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x: Any) -> Any:
        wide = x.astype(jnp.float32) if x.dtype != jnp.float64 else x
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-5)
        return self.weight[...] * wide.astype(x.dtype)


def rotate(x: Any) -> Any:
    """Rotary positions of [batch, length, heads, size]."""
    positions = jnp.arange(x.shape[1], dtype=jnp.float32)
    angles = positions[:, None] * 10000.0 ** (-jnp.arange(0, SIZE, 2, dtype=jnp.float32) / SIZE)
    angles = jnp.concatenate([angles, angles], -1)[:, None]
    one, two = jnp.split(x, 2, -1)
    return x * jnp.cos(angles).astype(x.dtype) + jnp.concatenate([-two, one], -1) * jnp.sin(angles).astype(x.dtype)


class Attention(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.q = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.k = nnx.Linear(WIDTH, WIDTH // 2, use_bias=False, rngs=rngs)
        self.v = nnx.Linear(WIDTH, WIDTH // 2, use_bias=False, rngs=rngs)
        self.o = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        rows, length, _ = x.shape
        q, k, v = (each(x).reshape(rows, length, -1, SIZE) for each in (self.q, self.k, self.v))
        q, k = rotate(q), rotate(k)
        k, v = jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / SIZE**0.5
        mask = jnp.tril(jnp.ones((length, length), bool))
        scores = jnp.where(mask, scores, -1e4)
        weights = jax.nn.softmax(scores, -1).astype(v.dtype)
        return self.o(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(rows, length, WIDTH))


class MLP(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.gate = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.norm1, self.attention, self.norm2, self.mlp = RMSNorm(), Attention(rngs), RMSNorm(), MLP(rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(BLOCKS)])
        self.norm = RMSNorm()
        self.head = nnx.Linear(WIDTH, WORDS, use_bias=False, rngs=rngs)

    def __call__(self, batch: Any) -> Any:
        x = self.embed(batch["tokens"])
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss_fn(model: Any, batch: Any) -> Any:
    logits = model(batch)[:, :-1].astype(jnp.float32)
    labels = batch["tokens"][:, 1:]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -picked.mean()

"""An encoder and a decoder as T5's, in flax nnx."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

WIDTH, HEADS, SIZE, WORDS, HIDDEN, DISTANCES = 16, 2, 8, 19, 32, 5


class T5Norm(nnx.Module):
    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x: Any) -> Any:
        variance = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
        return self.weight[...] * (x * jax.lax.rsqrt(variance + 1e-6))


class Attention(nnx.Module):
    def __init__(self, causal: bool, rngs: Any) -> None:
        self.causal = causal
        self.q, self.k, self.v, self.o = (nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs) for _ in range(4))

    def __call__(self, x: Any, memory: Any, bias: Any) -> Any:
        q, k, v = self.q(x), self.k(memory), self.v(memory)
        q, k, v = (each.reshape(*each.shape[:2], HEADS, SIZE) for each in (q, k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        if bias is not None:
            scores = scores + bias
        if self.causal:
            scores = scores + jnp.triu(jnp.full(scores.shape[-2:], -1e4), 1)
        weights = jax.nn.softmax(scores.astype(jnp.float32), -1).astype(v.dtype)
        return self.o(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))


class FeedForward(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.wi = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.wo = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.wo(jax.nn.gelu(self.wi(x), approximate=True))


class Side(nnx.Module):
    def __init__(self, decodes: bool, rngs: Any) -> None:
        self.relative = nnx.Embed(2 * DISTANCES + 1, HEADS, rngs=rngs)
        self.norm1, self.attention = T5Norm(), Attention(decodes, rngs)
        if decodes:
            self.norm2, self.cross = T5Norm(), Attention(False, rngs)
        self.norm3, self.mlp, self.last_norm = T5Norm(), FeedForward(rngs), T5Norm()

    def __call__(self, x: Any, memory: Any = None) -> Any:
        places = jnp.arange(x.shape[1])
        apart = jnp.clip(places[None, :] - places[:, None], -DISTANCES, DISTANCES) + DISTANCES
        bias = self.relative(apart).transpose(2, 0, 1)
        y = self.norm1(x)
        x = x + self.attention(y, y, bias)
        if memory is not None:
            x = x + self.cross(self.norm2(x), memory, None)
        x = x + self.mlp(self.norm3(x))
        return self.last_norm(x)


class Model(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.shared = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.encoder, self.decoder = Side(False, rngs), Side(True, rngs)

    def __call__(self, batch: Any) -> Any:
        memory = self.encoder(self.shared(batch["source"]))
        out = self.decoder(self.shared(batch["target"]), memory)
        return self.shared.attend(out * WIDTH**-0.5)


def loss_fn(model: Any, batch: Any) -> Any:
    logits, labels = model(batch).astype(jnp.float32), batch["labels"]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]
    counted = labels != 0
    return -jnp.sum(jnp.where(counted, picked, 0.0)) / counted.sum()

"""A U-Net of a diffusion model, in flax nnx."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

WIDTH, CHANNELS, GROUPS = 8, 3, 4


def time_embedding(times: Any) -> Any:
    rates = jnp.exp(-jnp.arange(WIDTH // 2, dtype=jnp.float32) * (9.210340371976184 / (WIDTH // 2)))
    angles = times[:, None] * rates
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


def conv(inputs: int, outputs: int, size: int, rngs: Any, strides: int = 1) -> Any:
    return nnx.Conv(inputs, outputs, (size, size), strides, padding=size // 2, rngs=rngs)


class Block(nnx.Module):
    def __init__(self, inputs: int, outputs: int, rngs: Any) -> None:
        self.norm1 = nnx.GroupNorm(inputs, GROUPS, epsilon=1e-6, rngs=rngs)
        self.conv1 = conv(inputs, outputs, 3, rngs)
        self.time = nnx.Linear(WIDTH, outputs, rngs=rngs)
        self.norm2 = nnx.GroupNorm(outputs, GROUPS, epsilon=1e-6, rngs=rngs)
        self.conv2 = conv(outputs, outputs, 3, rngs)
        self.shortcut = conv(inputs, outputs, 1, rngs)

    def __call__(self, x: Any, t: Any) -> Any:
        h = self.conv1(jax.nn.silu(self.norm1(x)))
        h = h + self.time(jax.nn.silu(t))[:, None, None, :]
        h = self.conv2(jax.nn.silu(self.norm2(h)))
        return self.shortcut(x) + h


class Model(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.time1, self.time2 = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.stem = conv(CHANNELS, WIDTH, 3, rngs)
        self.down = Block(WIDTH, WIDTH, rngs)
        self.smaller = conv(WIDTH, WIDTH, 3, rngs, strides=2)
        self.middle = Block(WIDTH, 2 * WIDTH, rngs)
        self.larger = conv(2 * WIDTH, WIDTH, 3, rngs)
        self.up = Block(2 * WIDTH, WIDTH, rngs)
        self.norm = nnx.GroupNorm(WIDTH, GROUPS, epsilon=1e-6, rngs=rngs)
        self.out = conv(WIDTH, CHANNELS, 3, rngs)

    def __call__(self, batch: Any) -> Any:
        t = self.time2(jax.nn.silu(self.time1(time_embedding(batch["times"]))))
        x = self.stem(batch["images"])
        skip = self.down(x, t)
        x = self.middle(self.smaller(skip), t)
        x = self.larger(jnp.repeat(jnp.repeat(x, 2, 1), 2, 2))
        x = self.up(jnp.concatenate([x, skip], -1), t)
        return self.out(jax.nn.silu(self.norm(x)))


def loss_fn(model: Any, batch: Any) -> Any:
    return jnp.square(model(batch).astype(jnp.float32) - batch["noise"]).mean()

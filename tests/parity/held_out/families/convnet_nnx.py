"""A convolutional net of the kind of EfficientNet and ConvNeXt, in flax nnx."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

WIDTH, CHANNELS, CLASSES = 8, 3, 5


class Squeeze(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.reduce, self.expand = nnx.Linear(WIDTH, 4, rngs=rngs), nnx.Linear(4, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        gates = jax.nn.sigmoid(self.expand(jax.nn.silu(self.reduce(x.mean((1, 2))))))
        return x * gates[:, None, None, :]


class MBConv(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.depthwise = nnx.Conv(WIDTH, WIDTH, (3, 3), padding=1, feature_group_count=WIDTH, use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(WIDTH, epsilon=1e-3, momentum=0.9, rngs=rngs)
        self.squeeze = Squeeze(rngs)
        self.project = nnx.Conv(WIDTH, WIDTH, (1, 1), use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(WIDTH, epsilon=1e-3, momentum=0.9, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        h = jax.nn.silu(self.norm1(self.depthwise(x)))
        return x + self.norm2(self.project(self.squeeze(h)))


class NeXt(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.depthwise = nnx.Conv(WIDTH, WIDTH, (5, 5), padding=2, feature_group_count=WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-6, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.gamma = nnx.Param(0.1 * jnp.ones(WIDTH))

    def __call__(self, x: Any) -> Any:
        h = self.norm(self.depthwise(x))
        h = self.down(jax.nn.gelu(self.up(h), approximate=False))
        return x + h * self.gamma[...]


class Model(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.stem = nnx.Conv(CHANNELS, WIDTH, (2, 2), 2, padding="VALID", rngs=rngs)
        self.mbconv, self.next = MBConv(rngs), NeXt(rngs)
        self.norm, self.head = nnx.LayerNorm(WIDTH, epsilon=1e-6, rngs=rngs), nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, batch: Any) -> Any:
        x = self.next(self.mbconv(self.stem(batch["images"])))
        return self.head(self.norm(x.mean((1, 2))))


def loss_fn(model: Any, batch: Any) -> Any:
    logits = model(batch).astype(jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][:, None], -1).mean()

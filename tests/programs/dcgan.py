"""A DCGAN: two states under one scaler, and the two halves of the step for each.

In the style of PyTorch's `examples/dcgan`, with a convolution on either side and batch normalisation in the generator.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import polyamp
from tests.programs.common import (
    Layer,
    keras_conv,
    keras_dense,
    layers,
    nnx_conv,
    nnx_dense,
    torch_conv,
    torch_dense,
)

NOISE, SIDE, CHANNELS = 5, 4, 3
GENERATOR = layers(2, dense=(NOISE, SIDE * SIDE * CHANNELS), conv=(3, 3, CHANNELS, 1))
DISCRIMINATOR = layers(3, conv=(3, 3, 1, CHANNELS), dense=(SIDE * SIDE * CHANNELS, 1))


def batch(number: int) -> dict[str, Any]:
    """Real pictures, noise, and the labels of both."""
    rng = np.random.default_rng(number)
    real = np.tanh(rng.normal(size=(8, SIDE, SIDE, 1)) + 1.0)
    return {
        "real": real.astype(np.float32),
        "noise": rng.normal(size=(8, NOISE)).astype(np.float32),
        "ones": np.ones((8, 1), np.float32),
        "zeros": np.zeros((8, 1), np.float32),
    }


def discriminator_loss(models: Any, batch: Any) -> Any:
    """Real pictures are real, made ones are not."""
    generator, discriminator = models
    real = polyamp.losses.sigmoid_cross_entropy(discriminator(batch["real"]), batch["ones"])
    fake = polyamp.losses.sigmoid_cross_entropy(discriminator(generator(batch["noise"])), batch["zeros"])
    return real + fake


def generator_loss(models: Any, batch: Any) -> Any:
    """Made pictures pass for real ones."""
    generator, discriminator = models
    return polyamp.losses.sigmoid_cross_entropy(discriminator(generator(batch["noise"])), batch["ones"])


def train(build: Any, recipe: polyamp.Recipe, steps: int, options: dict[str, Any]) -> list[float]:
    """The sum of both losses, step by step; each update changes one of the two states."""
    states = [polyamp.init(model, recipe) for model in build()]
    halves = [polyamp.value_and_grad(loss, **options) for loss in (generator_loss, discriminator_loss)]
    losses = []
    for number in range(steps):
        total = 0.0
        for turn in (1, 0):  # the discriminator first
            value, grads = halves[turn](states, batch(number % 2))
            states[turn], _ = polyamp.apply_gradients(states[turn], grads[turn])
            total += float(value)
        losses.append(total)
    return losses


def build_torch() -> Any:
    """Two `nn.Module`s."""
    import torch
    from torch import nn

    class Generator(nn.Module):
        def __init__(self, weights: dict[str, Layer]) -> None:
            super().__init__()
            self.dense, self.norm = torch_dense(weights["dense"]), nn.BatchNorm1d(SIDE * SIDE * CHANNELS)
            self.conv = torch_conv(weights["conv"])

        def forward(self, z: Any) -> Any:
            h = torch.relu(self.norm(self.dense(z))).reshape(-1, SIDE, SIDE, CHANNELS)
            return torch.tanh(self.conv(h.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))

    class Discriminator(nn.Module):
        def __init__(self, weights: dict[str, Layer]) -> None:
            super().__init__()
            self.conv, self.dense = torch_conv(weights["conv"]), torch_dense(weights["dense"])

        def forward(self, x: Any) -> Any:
            h = nn.functional.leaky_relu(self.conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1), 0.2)
            return self.dense(h.reshape(-1, SIDE * SIDE * CHANNELS))

    return Generator(GENERATOR), Discriminator(DISCRIMINATOR)


def build_tensorflow() -> Any:
    """Two `keras.Model`s."""
    from keras import Input, Sequential
    from keras import layers as kinds

    generator = Sequential(
        [
            Input((NOISE,)),
            keras_dense(GENERATOR["dense"], "dense"),
            kinds.BatchNormalization(epsilon=1e-5, name="norm"),
            kinds.ReLU(),
            kinds.Reshape((SIDE, SIDE, CHANNELS)),
            keras_conv(GENERATOR["conv"], "conv"),
            kinds.Activation("tanh"),
        ]
    )
    discriminator = Sequential(
        [
            Input((SIDE, SIDE, 1)),
            keras_conv(DISCRIMINATOR["conv"], "conv"),
            kinds.LeakyReLU(negative_slope=0.2),
            kinds.Flatten(),
            keras_dense(DISCRIMINATOR["dense"], "dense"),
        ]
    )
    return generator, discriminator


def build_jax() -> Any:
    """Two `nnx.Module`s."""
    from flax import nnx

    class Generator(nnx.Module):
        def __init__(self, weights: dict[str, Layer]) -> None:
            self.dense, self.conv = nnx_dense(weights["dense"]), nnx_conv(weights["conv"])
            self.norm = nnx.BatchNorm(SIDE * SIDE * CHANNELS, epsilon=1e-5, rngs=nnx.Rngs(0))

        def __call__(self, z: Any) -> Any:
            h = nnx.relu(self.norm(self.dense(z))).reshape(-1, SIDE, SIDE, CHANNELS)
            return nnx.tanh(self.conv(h))

    class Discriminator(nnx.Module):
        def __init__(self, weights: dict[str, Layer]) -> None:
            self.conv, self.dense = nnx_conv(weights["conv"]), nnx_dense(weights["dense"])

        def __call__(self, x: Any) -> Any:
            h = nnx.leaky_relu(self.conv(x), 0.2)
            return self.dense(h.reshape(-1, SIDE * SIDE * CHANNELS))

    return Generator(GENERATOR), Discriminator(DISCRIMINATOR)

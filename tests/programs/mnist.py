"""A convolutional classifier with dropout, as in flax's MNIST tutorial, whose nnx model is called as `model(x, rngs)`.

`loss_fn` calls `model(x)` in every framework: in JAX the state passes the streams that `init` was given. Frameworks
draw other masks, so that the curves are not compared.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import polyamp
from tests.programs.common import Layer, keras_conv, keras_dense, layers, nnx_conv, nnx_dense, torch_conv, torch_dense

SIDE, CHANNELS, CLASSES, RATE = 6, 4, 3, 0.25
WEIGHTS = layers(4, conv=(3, 3, 1, CHANNELS), dense=(SIDE * SIDE * CHANNELS, CLASSES))
PATTERNS = np.random.default_rng(5).normal(size=(CLASSES, SIDE, SIDE, 1))


def batch(number: int) -> dict[str, Any]:
    """Noisy patterns, and which."""
    rng = np.random.default_rng(number)
    label = rng.integers(0, CLASSES, 16)
    image = PATTERNS[label] + 0.3 * rng.normal(size=(16, SIDE, SIDE, 1))
    return {"image": image.astype(np.float32), "label": label.astype(np.int32)}


def loss_fn(model: Any, batch: Any) -> Any:
    """Cross-entropy: the same in every framework."""
    return polyamp.losses.softmax_cross_entropy(model(batch["image"]), batch["label"])


def options() -> dict[str, Any]:
    """What `init` is given in JAX."""
    from flax import nnx

    return {"rngs": nnx.Rngs(dropout=0)}


def build_torch() -> Any:
    """An `nn.Module`."""
    import torch
    from torch import nn

    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self, weights: dict[str, Layer]) -> None:
            super().__init__()
            self.conv, self.dense = torch_conv(weights["conv"]), torch_dense(weights["dense"])
            self.drop = nn.Dropout(RATE)

        def forward(self, x: Any) -> Any:
            h = torch.relu(self.conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
            return self.dense(self.drop(h.reshape(-1, SIDE * SIDE * CHANNELS)))

    return Net(WEIGHTS)


def build_tensorflow() -> Any:
    """A `keras.Model`."""
    import keras

    return keras.Sequential(
        [
            keras.Input((SIDE, SIDE, 1)),
            keras_conv(WEIGHTS["conv"], "conv"),
            keras.layers.ReLU(),
            keras.layers.Flatten(),
            keras.layers.Dropout(RATE, seed=0),
            keras_dense(WEIGHTS["dense"], "dense"),
        ]
    )


def build_jax() -> Any:
    """An `nnx.Module` that takes its streams."""
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, weights: dict[str, Layer]) -> None:
            self.conv, self.dense = nnx_conv(weights["conv"]), nnx_dense(weights["dense"])
            self.drop = nnx.Dropout(RATE)

        def __call__(self, x: Any, rngs: Any) -> Any:
            h = nnx.relu(self.conv(x)).reshape(-1, SIDE * SIDE * CHANNELS)
            return self.dense(self.drop(h, rngs=rngs))

    return Net(WEIGHTS)

"""What the programs share: layers with given weights in each framework, and how a program is trained.

Weights are NumPy arrays in one layout: dense kernels (in, out), convolutions (height, width, in, out), pictures
(rows, height, width, channels).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Layer(NamedTuple):
    """A layer's weights."""

    kernel: Array
    bias: Array


def layers(seed: int, **shapes: tuple[int, ...]) -> dict[str, Layer]:
    """Weights by name, of variance 1 / inputs."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in shapes.items():
        kernel = rng.normal(size=shape) / np.sqrt(np.prod(shape[:-1]))
        made[name] = Layer(kernel.astype(np.float32), np.zeros(shape[-1], np.float32))
    return made


def torch_dense(layer: Layer) -> Any:
    """An `nn.Linear`."""
    import torch

    made = torch.nn.Linear(*layer.kernel.shape)
    with torch.no_grad():
        made.weight.copy_(torch.tensor(layer.kernel.T.copy()))
        made.bias.copy_(torch.tensor(layer.bias))
    return made


def torch_conv(layer: Layer) -> Any:
    """An `nn.Conv2d` that keeps height and width; it takes channels first, as torch's do."""
    import torch

    *_, inputs, outputs = layer.kernel.shape
    made = torch.nn.Conv2d(inputs, outputs, 3, padding=1)
    with torch.no_grad():
        made.weight.copy_(torch.tensor(layer.kernel.transpose(3, 2, 0, 1).copy()))
        made.bias.copy_(torch.tensor(layer.bias))
    return made


def keras_dense(layer: Layer, name: str) -> Any:
    """A `keras.layers.Dense`."""
    import keras

    made = keras.layers.Dense(layer.kernel.shape[-1], name=name)
    made.build((None, layer.kernel.shape[0]))
    made.set_weights(list(layer))
    return made


def keras_conv(layer: Layer, name: str) -> Any:
    """A `keras.layers.Conv2D` that keeps height and width."""
    import keras

    made = keras.layers.Conv2D(layer.kernel.shape[-1], 3, padding="same", name=name)
    made.build((None, None, None, layer.kernel.shape[2]))
    made.set_weights(list(layer))
    return made


def nnx_dense(layer: Layer) -> Any:
    """An `nnx.Linear`."""
    from flax import nnx

    return _filled(nnx.Linear(*layer.kernel.shape, rngs=nnx.Rngs(0)), layer)


def nnx_conv(layer: Layer) -> Any:
    """An `nnx.Conv` that keeps height and width."""
    from flax import nnx

    *_, inputs, outputs = layer.kernel.shape
    return _filled(nnx.Conv(inputs, outputs, (3, 3), rngs=nnx.Rngs(0)), layer)


def _filled(module: Any, layer: Layer) -> Any:
    module.kernel[...] = layer.kernel
    module.bias[...] = layer.bias
    return module

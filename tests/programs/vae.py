"""A variational autoencoder: encode, sample in a layer of its own, decode, divergence, and an L2 penalty.

In the style of keras.io's VAE with a sampling layer and of flax's `examples/vae`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import polyamp
from tests.programs.common import Layer, keras_dense, layers, nnx_dense, torch_dense

PIXELS, HIDDEN, LATENTS = 12, 16, 3
WEIGHTS = layers(
    0,
    hidden=(PIXELS, HIDDEN),
    mean=(HIDDEN, LATENTS),
    log_variance=(HIDDEN, LATENTS),
    raise_=(LATENTS, HIDDEN),
    picture=(HIDDEN, PIXELS),
)


def batch(number: int) -> dict[str, Any]:
    """Pictures in [0, 1], and the noise, which every framework would draw differently."""
    rng = np.random.default_rng(number)
    return {
        "x": (rng.random((8, PIXELS)) > 0.6).astype(np.float32),
        "noise": rng.normal(size=(8, LATENTS)).astype(np.float32),
    }


def loss_fn(model: Any, batch: Any) -> Any:
    """Reconstruction, divergence and penalty: the same in every framework."""
    mean, log_variance = model.encode(batch["x"])
    z = model.sampling(mean, log_variance, batch["noise"])
    reconstruction = polyamp.losses.sigmoid_cross_entropy(model.decode(z), batch["x"])
    kernels = [p for path, p in polyamp.parameters(model).items() if not path.endswith("bias")]
    penalty = polyamp.losses.sum_of_squares(kernels)
    return reconstruction + 0.1 * model.divergence(mean, log_variance) + 1e-3 * penalty


def build_torch() -> Any:
    """An `nn.Module`."""
    import torch
    from torch import nn

    class Sampling(nn.Module):
        def forward(self, mean: Any, log_variance: Any, noise: Any) -> Any:
            return mean + torch.exp(0.5 * log_variance) * noise

    class VAE(nn.Module):
        def __init__(self, weights: dict[str, Layer]) -> None:
            super().__init__()
            self.hidden, self.mean, self.log_variance, self.raise_, self.picture = map(torch_dense, weights.values())
            self.sampling = Sampling()

        def encode(self, x: Any) -> Any:
            h = torch.relu(self.hidden(x))
            return self.mean(h), self.log_variance(h)

        def decode(self, z: Any) -> Any:
            return self.picture(torch.relu(self.raise_(z)))

        def divergence(self, mean: Any, log_variance: Any) -> Any:
            return -0.5 * torch.mean(1 + log_variance - mean**2 - torch.exp(log_variance))

    return VAE(WEIGHTS)


def build_tensorflow() -> Any:
    """A `keras.Model`."""
    import keras
    from keras import ops

    class Sampling(keras.layers.Layer):
        def call(self, mean: Any, log_variance: Any, noise: Any) -> Any:
            return mean + ops.exp(0.5 * log_variance) * noise

    class VAE(keras.Model):
        def __init__(self, weights: dict[str, Layer]) -> None:
            super().__init__(name="vae")
            made = (keras_dense(layer, name.strip("_")) for name, layer in weights.items())
            self.hidden, self.mean, self.log_variance, self.raise_, self.picture = made
            self.sampling = Sampling(name="sampling")
            self.sampling.built = self.built = True

        def encode(self, x: Any) -> Any:
            h = ops.relu(self.hidden(x))
            return self.mean(h), self.log_variance(h)

        def decode(self, z: Any) -> Any:
            return self.picture(ops.relu(self.raise_(z)))

        def divergence(self, mean: Any, log_variance: Any) -> Any:
            return -0.5 * ops.mean(1 + log_variance - ops.square(mean) - ops.exp(log_variance))

    return VAE(WEIGHTS)


def build_jax() -> Any:
    """An `nnx.Module`."""
    import jax.numpy as jnp
    from flax import nnx

    class Sampling(nnx.Module):
        def __call__(self, mean: Any, log_variance: Any, noise: Any) -> Any:
            return mean + jnp.exp(0.5 * log_variance) * noise

    class VAE(nnx.Module):
        def __init__(self, weights: dict[str, Layer]) -> None:
            self.hidden, self.mean, self.log_variance, self.raise_, self.picture = map(nnx_dense, weights.values())
            self.sampling = Sampling()

        def encode(self, x: Any) -> Any:
            h = nnx.relu(self.hidden(x))
            return self.mean(h), self.log_variance(h)

        def decode(self, z: Any) -> Any:
            return self.picture(nnx.relu(self.raise_(z)))

        def divergence(self, mean: Any, log_variance: Any) -> Any:
            return -0.5 * jnp.mean(1 + log_variance - mean**2 - jnp.exp(log_variance))

    return VAE(WEIGHTS)

"""CLIP: two encoders, called as methods, and a learned temperature that `loss_fn` reads.

In the style of open_clip's loss. JAX's model is linen's, with submodules from `setup`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import polyamp
from tests.programs.common import Layer, keras_dense, layers, torch_dense

PIXELS, WORDS, WIDTH, START = 10, 6, 8, 2.0
WEIGHTS = layers(1, image=(PIXELS, WIDTH), text=(WORDS, WIDTH))


def batch(number: int) -> dict[str, Any]:
    """Two micro-batches of six pairs."""
    rng = np.random.default_rng(number)
    picture = rng.normal(size=(12, PIXELS)).astype(np.float32)
    return {"image": picture, "text": picture[:, :WORDS] + 0.1 * rng.normal(size=(12, WORDS)).astype(np.float32)}


def loss_fn(model: Any, batch: Any) -> Any:
    """Both cross-entropies of the similarities: the same in every framework."""
    image, text = model.encode_image(batch["image"]), model.encode_text(batch["text"])
    logits = model.exp(model.logit_scale) * model.similarity(image, text)
    labels = np.arange(6)
    one = polyamp.losses.softmax_cross_entropy(logits, labels)
    other = polyamp.losses.softmax_cross_entropy(model.transposed(logits), labels)
    return 0.5 * (one + other)


def build_torch() -> Any:
    """An `nn.Module`."""
    import torch
    from torch import nn

    class CLIP(nn.Module):
        exp = staticmethod(torch.exp)
        transposed = staticmethod(torch.t)

        def __init__(self, weights: dict[str, Layer]) -> None:
            super().__init__()
            self.image, self.text = map(torch_dense, weights.values())
            self.logit_scale = nn.Parameter(torch.tensor(START))

        def encode_image(self, x: Any) -> Any:
            return nn.functional.normalize(self.image(x), dim=-1)

        def encode_text(self, x: Any) -> Any:
            return nn.functional.normalize(self.text(x), dim=-1)

        def similarity(self, image: Any, text: Any) -> Any:
            return image @ text.T

    return CLIP(WEIGHTS)


def build_tensorflow() -> Any:
    """A `keras.Model`."""
    import keras
    from keras import ops

    class CLIP(keras.Model):
        exp = staticmethod(ops.exp)
        transposed = staticmethod(ops.transpose)

        def __init__(self, weights: dict[str, Layer]) -> None:
            super().__init__(name="clip")
            self.image, self.text = (keras_dense(layer, name) for name, layer in weights.items())
            self.logit_scale = self.add_weight(shape=(), initializer=lambda *_, **__: START, name="logit_scale")
            self.built = True

        def encode_image(self, x: Any) -> Any:
            return ops.normalize(self.image(x), axis=-1)

        def encode_text(self, x: Any) -> Any:
            return ops.normalize(self.text(x), axis=-1)

        def similarity(self, image: Any, text: Any) -> Any:
            return image @ ops.transpose(text)

    return CLIP(WEIGHTS)


def build_jax() -> Any:
    """A linen module with its variables."""
    import jax.numpy as jnp
    from flax import linen

    class CLIP(linen.Module):
        exp = staticmethod(jnp.exp)
        transposed = staticmethod(jnp.transpose)

        def setup(self) -> None:
            self.image = linen.Dense(WIDTH)
            self.text = linen.Dense(WIDTH)
            self.logit_scale = self.param("logit_scale", linen.initializers.constant(START), ())

        def encode_image(self, x: Any) -> Any:
            x = self.image(x)
            return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

        def encode_text(self, x: Any) -> Any:
            x = self.text(x)
            return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

        def similarity(self, image: Any, text: Any) -> Any:
            return image @ text.T

    params = {name: layer._asdict() for name, layer in WEIGHTS.items()}
    return CLIP(), {"params": {**params, "logit_scale": jnp.asarray(START)}}

"""A variational autoencoder, in flax nnx."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

PIXELS, HIDDEN, CODE = 20, 16, 4


class Model(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.encoder = nnx.Linear(PIXELS, HIDDEN, rngs=rngs)
        self.norm = nnx.LayerNorm(HIDDEN, epsilon=1e-5, rngs=rngs)
        self.mean, self.log_variance = nnx.Linear(HIDDEN, CODE, rngs=rngs), nnx.Linear(HIDDEN, CODE, rngs=rngs)
        self.decoder1, self.decoder2 = nnx.Linear(CODE, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, PIXELS, rngs=rngs)

    def __call__(self, batch: Any) -> Any:
        h = jnp.tanh(self.norm(self.encoder(batch["x"])))
        mean, log_variance = self.mean(h), self.log_variance(h)
        code = mean + jnp.exp(0.5 * log_variance) * batch["noise"]
        return self.decoder2(jax.nn.elu(self.decoder1(code))), mean, log_variance


def loss_fn(model: Any, batch: Any) -> Any:
    logits, mean, log_variance = (each.astype(jnp.float32) for each in model(batch))
    bits = (jax.nn.softplus(logits) - logits * batch["x"]).sum(-1).mean()
    divergence = -0.5 * (1.0 + log_variance - jnp.square(mean) - jnp.exp(log_variance)).sum(-1).mean()
    return bits + divergence

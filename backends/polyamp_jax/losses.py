"""Loss functions on JAX arrays, in float32 also inside an autocast function (S4). Called by `polyamp.losses`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from polyamp_jax.autocast import keep_precision


class JaxLosses:
    """`LossFunctions` over jax.numpy; the formulas are the stable ones of optax and torch."""

    @keep_precision
    def mean_squared_error(self, predictions: Any, targets: Any) -> Any:
        return jnp.square(_wide(predictions) - _wide(targets))

    @keep_precision
    def softmax_cross_entropy(self, logits: Any, labels: Any) -> Any:
        # log_softmax at the labels alone: all of its rows would be one more array to write and to read back
        x = _wide(logits)
        largest = jax.lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
        own = jnp.take_along_axis(x, jnp.asarray(labels)[..., None], axis=-1) - largest
        return jnp.log(jnp.sum(jnp.exp(x - largest), axis=-1)) - own[..., 0]

    @keep_precision
    def sigmoid_cross_entropy(self, logits: Any, targets: Any) -> Any:
        x, z = _wide(logits), _wide(targets)
        return jnp.maximum(x, 0.0) - x * z + jnp.log1p(jnp.exp(-jnp.abs(x)))

    @keep_precision
    def huber(self, predictions: Any, targets: Any, delta: float) -> Any:
        magnitude = jnp.abs(_wide(predictions) - _wide(targets))
        within = jnp.minimum(magnitude, delta)
        return 0.5 * within * within + delta * (magnitude - within)

    @keep_precision
    def mean(self, values: Any) -> Any:
        return jnp.mean(_wide(values))


def _wide(x: Any) -> jax.Array:
    return jnp.asarray(x, jnp.float32)

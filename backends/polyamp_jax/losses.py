"""Loss functions on JAX arrays; they compute in float32 also inside autocast functions (S4)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from polyamp_jax.precision.interpreter.tracing import KEEP_SCOPE


class JaxLosses:
    """`LossFunctions` implementation in jax.numpy, with the stable formulas of optax and torch."""

    def in_float32(self) -> contextlib.AbstractContextManager[Any]:
        scope: contextlib.AbstractContextManager[Any] = jax.named_scope(KEEP_SCOPE)
        return scope

    def wide(self, values: Any, like: Any) -> Any:
        return _wide(values)

    def constant(self, values: Any, like: Any) -> Any:
        return jax.lax.stop_gradient(_wide(values))

    def indices(self, labels: Any, like: Any) -> Any:
        labels = jnp.asarray(labels)
        narrow = labels.dtype.itemsize < 4
        return labels.astype(jnp.int32) if narrow else labels.astype(f"int{8 * labels.dtype.itemsize}")

    def on_host(self, labels: Any) -> np.ndarray[Any, Any] | None:
        if isinstance(labels, np.ndarray):
            return labels
        if isinstance(labels, jax.core.Tracer) or not labels.is_fully_addressable:
            return None
        return np.asarray(labels) if all(device.platform == "cpu" for device in labels.devices()) else None

    def classes(self, logits: Any) -> int:
        return int(logits.shape[-1])

    def mean_squared_error(self, predictions: Any, targets: Any) -> Any:
        return jnp.square(_wide(predictions) - _wide(targets))

    def softmax_cross_entropy(self, logits: Any, labels: Any, reduction: str) -> Any:
        # log_softmax at the labels only: the full result would be one more array to write and read back
        x = _wide(logits)
        largest = jax.lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
        own = self.pick(x, labels) - largest[..., 0]
        rows = jnp.log(jnp.sum(jnp.exp(x - largest), axis=-1)) - own
        return rows if reduction == "none" else self.mean(rows) if reduction == "mean" else self.sum(rows)

    def sigmoid_cross_entropy(self, logits: Any, targets: Any) -> Any:
        x, z = _wide(logits), _wide(targets)
        return jnp.maximum(x, 0.0) - x * z + jnp.log1p(jnp.exp(-jnp.abs(x)))

    def huber(self, predictions: Any, targets: Any, delta: float) -> Any:
        magnitude = jnp.abs(_wide(predictions) - _wide(targets))
        within = jnp.minimum(magnitude, delta)
        return 0.5 * within * within + delta * (magnitude - within)

    def log_softmax(self, logits: Any) -> Any:
        return jax.nn.log_softmax(_wide(logits), axis=-1)

    def pick(self, values: Any, labels: Any) -> Any:
        return jnp.take_along_axis(values, labels[..., None], axis=-1)[..., 0]

    def take(self, values: Any, labels: Any) -> Any:
        return values[labels]

    def exp(self, values: Any) -> Any:
        return jnp.exp(_wide(values))

    def log(self, values: Any) -> Any:
        return jnp.log(_wide(values))

    def diagonal(self, values: Any) -> Any:
        return jnp.diagonal(values)

    def positions(self, values: Any, axis: int) -> Any:
        return jnp.arange(values.shape[axis], dtype=jnp.float32)

    def ctc(self, logits: Any, labels: Any, logit_lengths: Any, label_lengths: Any, blank: int) -> Any:
        beyond = [
            (self.positions(values, 1)[None] >= lengths[:, None]).astype(jnp.float32)
            for values, lengths in ((logits, logit_lengths), (labels, label_lengths))
        ]
        return optax.ctc_loss(logits, beyond[0], labels, beyond[1], blank_id=blank)

    def linear(self, x: Any, weight: Any, bias: Any, dtype: str | None) -> Any:
        product = x.dtype if dtype is None else dtype
        with contextlib.nullcontext() if dtype is None else self.in_float32():
            out = jnp.matmul(x.astype(product), jnp.asarray(weight).astype(product).T)
            return out if bias is None else out + jnp.asarray(bias).astype(product)

    def map_chunks(
        self, function: Callable[..., Any], arrays: Sequence[Any], shared: Sequence[Any], axis: int, chunks: int
    ) -> Any:
        length = arrays[0].shape[axis]
        size = max(1, -(-length // chunks))
        count = max(1, -(-length // size))

        def parts(array: Any) -> Any:  # the other axes keep their shardings
            padding = [(0, count * size - length if n == axis else 0) for n in range(array.ndim)]
            cut = jnp.pad(array, padding).reshape(*array.shape[:axis], count, size, *array.shape[axis + 1 :])
            return jnp.moveaxis(cut, axis, 0)

        wide = [_wide(array) if array.dtype.itemsize < 4 else array for array in map(jnp.asarray, shared)]
        recomputed = jax.checkpoint(lambda part: function(*part, *wide), prevent_cse=False)  # not needed in a loop
        rows = jnp.moveaxis(jax.lax.map(recomputed, tuple(map(parts, arrays))), 0, axis)
        joined = rows.reshape(*rows.shape[:axis], count * size, *rows.shape[axis + 2 :])
        return jax.lax.slice_in_dim(joined, 0, length, axis=axis)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        dtype = x.dtype if isinstance(x, jax.Array) else jnp.float32
        return jnp.where(condition, jnp.asarray(x, dtype), jnp.asarray(y, dtype))

    def sum(self, values: Any, axis: int | None = None) -> Any:
        return jnp.sum(_wide(values), axis=axis)

    def mean(self, values: Any, axis: int | None = None) -> Any:
        return jnp.mean(_wide(values), axis=axis)


def _wide(x: Any) -> jax.Array:
    return jnp.asarray(x, jnp.float32)

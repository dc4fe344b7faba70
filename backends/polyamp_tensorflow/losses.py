"""Building blocks of `polyamp.losses` on TensorFlow tensors, computed in float32 (S4)."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import tensorflow as tf


class TensorFlowLosses:
    """`LossFunctions` over tensors."""

    def in_float32(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()  # TensorFlow has no implicit casts

    def wide(self, values: Any, like: Any) -> Any:
        return _wide(values)

    def constant(self, values: Any, like: Any) -> Any:
        return tf.stop_gradient(_wide(values))

    def indices(self, labels: Any, like: Any) -> Any:
        labels = tf.convert_to_tensor(labels)
        if labels.dtype in (tf.int32, tf.int64):
            return labels
        return tf.cast(labels, tf.int64 if labels.dtype in (tf.uint32, tf.uint64) else tf.int32)

    def on_host(self, labels: Any) -> np.ndarray[Any, Any] | None:
        if isinstance(labels, np.ndarray):
            return labels
        eager = isinstance(labels, tf.Tensor) and hasattr(labels, "numpy") and "CPU" in labels.device
        return np.asarray(labels) if eager else None

    def classes(self, logits: Any) -> Any:
        return logits.shape[-1] if logits.shape[-1] is not None else tf.shape(logits)[-1]

    def mean_squared_error(self, predictions: Any, targets: Any) -> Any:
        return tf.square(_wide(predictions) - _wide(targets))

    def softmax_cross_entropy(self, logits: Any, labels: Any, reduction: str) -> Any:
        rows = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=_wide(logits))
        return rows if reduction == "none" else self.mean(rows) if reduction == "mean" else self.sum(rows)

    def sigmoid_cross_entropy(self, logits: Any, targets: Any) -> Any:
        return tf.nn.sigmoid_cross_entropy_with_logits(labels=_wide(targets), logits=_wide(logits))

    def huber(self, predictions: Any, targets: Any, delta: float) -> Any:
        distance = tf.abs(_wide(predictions) - _wide(targets))
        near = tf.minimum(distance, delta)
        return near * (distance - 0.5 * near)

    def log_softmax(self, logits: Any) -> Any:
        return tf.nn.log_softmax(_wide(logits), axis=-1)

    def pick(self, values: Any, labels: Any) -> Any:
        return tf.gather(values, labels, axis=-1, batch_dims=labels.shape.rank)

    def take(self, values: Any, labels: Any) -> Any:
        return tf.gather(values, labels)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        dtype = x.dtype if tf.is_tensor(x) else tf.float32
        return tf.where(condition, tf.cast(x, dtype), tf.cast(y, dtype))

    def sum(self, values: Any, axis: int | None = None) -> Any:
        return tf.reduce_sum(_wide(values), axis=axis)

    def mean(self, values: Any, axis: int | None = None) -> Any:
        return tf.reduce_mean(_wide(values), axis=axis)


def _wide(values: Any) -> Any:
    return tf.cast(tf.convert_to_tensor(values), tf.float32)

"""Losses on TensorFlow tensors, computed in float32 (S4); `polyamp.losses` dispatches here."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class TensorFlowLosses:
    """`LossFunctions` over tensors."""

    def mean_squared_error(self, predictions: Any, targets: Any) -> Any:
        return tf.square(_wide(predictions) - _wide(targets))

    def softmax_cross_entropy(self, logits: Any, labels: Any) -> Any:
        labels = tf.convert_to_tensor(labels)
        if labels.dtype not in (tf.int32, tf.int64):
            labels = tf.cast(labels, tf.int32)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=_wide(logits))

    def sigmoid_cross_entropy(self, logits: Any, targets: Any) -> Any:
        return tf.nn.sigmoid_cross_entropy_with_logits(labels=_wide(targets), logits=_wide(logits))

    def huber(self, predictions: Any, targets: Any, delta: float) -> Any:
        distance = tf.abs(_wide(predictions) - _wide(targets))
        near = tf.minimum(distance, delta)
        return near * (distance - 0.5 * near)

    def mean(self, values: Any) -> Any:
        return tf.reduce_mean(_wide(values))


def _wide(values: Any) -> Any:
    return tf.cast(tf.convert_to_tensor(values), tf.float32)

"""Building blocks of `polyamp.losses` on TensorFlow tensors, computed in float32 (S4)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
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

    def exp(self, values: Any) -> Any:
        return tf.exp(_wide(values))

    def log(self, values: Any) -> Any:
        return tf.math.log(_wide(values))

    def diagonal(self, values: Any) -> Any:
        return tf.linalg.diag_part(values)

    def positions(self, values: Any, axis: int) -> Any:
        return tf.range(tf.cast(tf.shape(values)[axis], tf.float32), dtype=tf.float32)

    def ctc(self, logits: Any, labels: Any, logit_lengths: Any, label_lengths: Any, blank: int) -> Any:
        frames, counts = tf.cast(logit_lengths, tf.int32), tf.cast(label_lengths, tf.int32)
        rows = tf.cast(labels, tf.int32)
        return tf.nn.ctc_loss(rows, logits, counts, frames, logits_time_major=False, blank_index=blank)

    def linear(self, x: Any, weight: Any, bias: Any, dtype: str | None) -> Any:
        product = x.dtype if dtype is None else dtype
        out = tf.matmul(tf.cast(x, product), tf.cast(weight, product), transpose_b=True)
        return out if bias is None else out + tf.cast(bias, product)

    def map_chunks(
        self, function: Callable[..., Any], arrays: Sequence[Any], shared: Sequence[Any], axis: int, chunks: int
    ) -> Any:
        wide = [_wide(a) if a.dtype.size < 4 else a for a in map(tf.convert_to_tensor, shared)]
        return _map_chunks(function, [tf.convert_to_tensor(a) for a in arrays], wide, axis, chunks)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        dtype = x.dtype if tf.is_tensor(x) else tf.float32
        return tf.where(condition, tf.cast(x, dtype), tf.cast(y, dtype))

    def sum(self, values: Any, axis: int | None = None) -> Any:
        return tf.reduce_sum(_wide(values), axis=axis)

    def mean(self, values: Any, axis: int | None = None) -> Any:
        return tf.reduce_mean(_wide(values), axis=axis)


def _map_chunks(function: Callable[..., Any], arrays: list[Any], shared: list[Any], axis: int, chunks: int) -> Any:
    """Compute `TensorFlowLosses.map_chunks` in two loops, one for the values and one for the gradients: the gradient of
    a `tf.while_loop` would keep what each part computes."""
    length = arrays[0].shape[axis]
    if length is None:
        length = tf.shape(arrays[0])[axis]
        size = tf.maximum(1, -(-length // chunks))
        count = tf.maximum(1, -(-length // size))
    else:
        size = max(1, -(-length // chunks))
        count = max(1, -(-length // size))

    def cut(array: Any) -> Any:
        """Return the parts as the rows of an array, padded with zeros."""
        rank, shape = array.shape.rank, _shape(array)
        padding = [(0, count * size - length if n == axis else 0) for n in range(rank)]
        parts = tf.reshape(tf.pad(array, padding), (*shape[:axis], count, size, *shape[axis + 1 :]))
        return tf.transpose(parts, (axis, *(n for n in range(rank + 1) if n != axis)))

    def join(parts: Any) -> Any:
        """Return the array of these parts, without the padding."""
        rank, shape = parts.shape.rank, _shape(parts)
        order = (*range(1, axis + 1), 0, *range(axis + 1, rank))
        whole = tf.reshape(tf.transpose(parts, order), (*shape[1 : axis + 1], count * size, *shape[axis + 2 :]))
        return tf.slice(whole, [0] * (rank - 1), [length if n == axis else -1 for n in range(rank - 1)])

    def loop(body: Callable[..., Any], values: Any) -> Any:
        return tf.while_loop(
            lambda n, *_: n < count, body, (tf.constant(0), *values), parallel_iterations=1, maximum_iterations=count
        )[1:]

    def stacked(dtype: Any, shape: Any) -> Any:
        return tf.TensorArray(dtype, size=count, element_shape=shape)

    @tf.custom_gradient  # type: ignore[untyped-decorator]  # TensorFlow is untyped
    def mapped(*inputs: Any) -> Any:
        parts, whole = [cut(array) for array in inputs[: len(arrays)]], inputs[len(arrays) :]

        def value(n: Any, rows: Any) -> Any:
            return n + 1, rows.write(n, function(*[part[n] for part in parts], *whole))

        (rows,) = loop(value, (stacked(tf.float32, parts[0].shape[1:-1]),))

        def gradient(upstream: Any) -> Any:
            cotangents = cut(upstream)

            def add(n: Any, pieces: Any, *sums: Any) -> Any:
                own = [part[n] for part in parts]
                sources = [own[0], *whole]
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch(sources)
                    out = function(*own, *whole)
                piece, *found = tape.gradient(out, sources, cotangents[n], unconnected_gradients="zero")
                return n + 1, pieces.write(n, piece), *(t + g for t, g in zip(sums, found, strict=True))

            pieces, *sums = loop(add, (stacked(arrays[0].dtype, parts[0].shape[1:]), *map(tf.zeros_like, whole)))
            return join(pieces.stack()), *(None for _ in arrays[1:]), *sums

        return join(rows.stack()), gradient

    return mapped(*arrays, *shared)


def _shape(array: Any) -> list[Any]:
    """Return the lengths of the axes: numbers, or scalars where a compiler does not know them."""
    known, found = array.shape.as_list(), tf.shape(array)
    return [found[n] if length is None else length for n, length in enumerate(known)]


def _wide(values: Any) -> Any:
    return tf.cast(tf.convert_to_tensor(values), tf.float32)

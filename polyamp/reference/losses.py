"""Losses of the reference backend: computed in float32, on tensors or on plain NumPy arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polyamp.reference import tensor as ops
from polyamp.reference.arrays import Array, dtype_name
from polyamp.reference.ctc import ctc_loss_and_slopes
from polyamp.reference.tensor import Tensor


class ReferenceLosses:
    """`LossFunctions` for NumPy; for NumPy arrays it returns NumPy arrays."""

    def in_float32(self) -> contextlib.AbstractContextManager[Any]:
        return np.errstate(all="ignore")  # as in a step: a division by 0 rows is NaN, which is the result

    def wide(self, values: Any, like: Any) -> Any:
        return _return_like(like, _to_float32(values))

    def constant(self, values: Any, like: Any) -> Any:
        return np.asarray(values.data if isinstance(values, Tensor) else values, np.float32)

    def indices(self, labels: Any, like: Any) -> Array:
        return self.on_host(labels).astype(np.int64)

    def on_host(self, labels: Any) -> Array:
        return np.asarray(labels.data if isinstance(labels, Tensor) else labels)

    def classes(self, logits: Any) -> int:
        return int(logits.shape[-1])

    def mean_squared_error(self, predictions: Any, targets: Any) -> Any:
        difference = _to_float32(predictions) - _to_float32(targets)
        return _return_like(predictions, difference * difference)

    def softmax_cross_entropy(self, logits: Any, labels: Any, reduction: str) -> Any:
        rows = -self.pick(self.log_softmax(logits), labels)
        return rows if reduction == "none" else self.mean(rows) if reduction == "mean" else self.sum(rows)

    def sigmoid_cross_entropy(self, logits: Any, targets: Any) -> Any:
        x, z = _to_float32(logits), _to_float32(targets)
        magnitude = ops.relu(x) + ops.relu(-x)
        softplus = ops.log(ops.exp(-magnitude) + np.float32(1.0))
        return _return_like(logits, ops.relu(x) - x * z + softplus)

    def huber(self, predictions: Any, targets: Any, delta: float) -> Any:
        difference = _to_float32(predictions) - _to_float32(targets)
        magnitude = ops.relu(difference) + ops.relu(-difference)
        beyond = ops.relu(magnitude - np.float32(delta))
        within = magnitude - beyond
        return _return_like(predictions, np.float32(0.5) * within * within + np.float32(delta) * beyond)

    def log_softmax(self, logits: Any) -> Any:
        return _return_like(logits, ops.log_softmax(_to_float32(logits)))

    def pick(self, values: Any, labels: Any) -> Any:
        return values[(*np.indices(labels.shape), labels)]

    def take(self, values: Any, labels: Any) -> Any:
        return values[labels]

    def exp(self, values: Any) -> Any:
        return _return_like(values, ops.exp(_to_float32(values)))

    def log(self, values: Any) -> Any:
        return _return_like(values, ops.log(_to_float32(values)))

    def diagonal(self, values: Any) -> Any:
        return values[(np.arange(values.shape[0]),) * 2]

    def positions(self, values: Any, axis: int) -> Array:
        return np.arange(values.shape[axis], dtype=np.float32)

    def ctc(self, logits: Any, labels: Any, logit_lengths: Any, label_lengths: Any, blank: int) -> Any:
        rows = ops.log_softmax(_to_float32(logits))
        found = [
            ctc_loss_and_slopes(rows.data[number, : int(frames)], labels[number, : int(count)], blank)
            for number, (frames, count) in enumerate(zip(logit_lengths, label_lengths, strict=True))
        ]
        slopes = np.zeros(rows.shape, np.float32)
        for slope, (_, own) in zip(slopes, found, strict=True):
            slope[: len(own)] = own
        values = np.array([loss for loss, _ in found], np.float32)
        return _return_like(logits, Tensor(values, [(rows, lambda g: g[:, None, None] * slopes)]))

    def linear(self, x: Any, weight: Any, bias: Any, dtype: str | None) -> Any:
        given, matrix = ops.tensor(x), ops.tensor(weight)
        rows = Tensor(given.data.reshape(-1, given.shape[-1]), [(given, lambda g: g.reshape(given.shape))])
        turned = Tensor(matrix.data.T, [(matrix, lambda g: g.T)])
        with contextlib.nullcontext() if dtype is None else ops.casting_mode(dtype, sensitive=False):
            flat = ops.matmul(rows, ops.cast(turned, dtype_name(given.dtype)))
        if bias is not None:
            flat = flat + ops.cast(bias, dtype_name(flat.dtype))
        shape = (*given.shape[:-1], matrix.shape[0])
        both = isinstance(x, Tensor) or isinstance(weight, Tensor)
        return _return_like(
            flat if both else x, Tensor(flat.data.reshape(shape), [(flat, lambda g: g.reshape(flat.shape))])
        )

    def map_chunks(
        self, function: Callable[..., Any], arrays: Sequence[Any], shared: Sequence[Any], axis: int, chunks: int
    ) -> Any:
        return function(*arrays, *shared)  # the reference is there for numbers, and holds what a tape holds

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        if isinstance(x, Tensor):
            return ops.where(condition, x, y)
        chosen = np.where(condition, x, y)
        return chosen if chosen.dtype.kind == "i" else chosen.astype(np.float32)

    def sum(self, values: Any, axis: int | None = None) -> Any:
        return _return_like(values, ops.total(_to_float32(values), axis))

    def mean(self, values: Any, axis: int | None = None) -> Any:
        return _return_like(values, ops.mean(_to_float32(values), axis))


def _to_float32(x: Any) -> Tensor:
    x = ops.tensor(x)
    return ops.cast(x, "float32") if x.dtype.kind in "fV" else ops.Tensor(x.data.astype(np.float32))


def _return_like(source: Any, value: Tensor) -> Any:
    return value if isinstance(source, Tensor) else value.data

"""`LossFunctions` for MLX: the formulas of `polyamp.losses`, in float32 for every input dtype (S4, S24)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from polyamp_mlx.arrays import to_device, to_numpy
from polyamp_mlx.precision.autocast import precision_region

_IMPOSSIBLE = -1e30
"""Log of a probability of 0 whose derivatives are finite."""


class MLXLosses:
    """`LossFunctions` over MLX; labels and targets may also be NumPy arrays."""

    def in_float32(self) -> contextlib.AbstractContextManager[Any]:
        return precision_region(None)

    def wide(self, values: Any, like: Any) -> Any:
        return _wide(values)

    def constant(self, values: Any, like: Any) -> Any:
        return mx.stop_gradient(_wide(values))

    def indices(self, labels: Any, like: Any) -> Any:
        return to_device(labels).astype(mx.int32)

    def on_host(self, labels: Any) -> Any:
        return labels if isinstance(labels, np.ndarray) else to_numpy(labels)

    def classes(self, logits: Any) -> int:
        return int(logits.shape[-1])

    def mean_squared_error(self, predictions: Any, targets: Any) -> Any:
        return mx.square(_wide(predictions) - _wide(targets))

    def softmax_cross_entropy(self, logits: Any, labels: Any, reduction: str) -> Any:
        wide = _wide(logits)
        rows = mx.logsumexp(wide, axis=-1) - self.pick(wide, labels)
        return rows if reduction == "none" else rows.mean() if reduction == "mean" else rows.sum()

    def sigmoid_cross_entropy(self, logits: Any, targets: Any) -> Any:
        x = _wide(logits)
        return mx.logaddexp(x, 0.0) - x * _wide(targets)

    def huber(self, predictions: Any, targets: Any, delta: float) -> Any:
        distance = mx.abs(_wide(predictions) - _wide(targets))
        within = mx.minimum(distance, delta)
        return 0.5 * within * within + delta * (distance - within)

    def log_softmax(self, logits: Any) -> Any:
        wide = _wide(logits)
        return wide - mx.logsumexp(wide, axis=-1, keepdims=True)

    def pick(self, values: Any, labels: Any) -> Any:
        return mx.take_along_axis(values, labels[..., None], axis=-1).squeeze(-1)

    def take(self, values: Any, labels: Any) -> Any:
        return values[labels]

    def exp(self, values: Any) -> Any:
        return mx.exp(_wide(values))

    def log(self, values: Any) -> Any:
        return mx.log(_wide(values))

    def diagonal(self, values: Any) -> Any:
        return mx.diagonal(values)

    def positions(self, values: Any, axis: int) -> Any:
        return mx.arange(values.shape[axis], dtype=mx.float32)

    def ctc(self, logits: Any, labels: Any, logit_lengths: Any, label_lengths: Any, blank: int) -> Any:
        """Forward algorithm over the labels with a blank before, between and after them."""
        rows, batch, size = self.log_softmax(logits), labels.shape[0], 2 * labels.shape[1] + 1
        blanks = mx.full(labels.shape, blank, dtype=labels.dtype)
        path = mx.concatenate([mx.stack([blanks, labels], -1).reshape(batch, size - 1), mx.full((batch, 1), blank)], 1)
        path, place, low = path.astype(mx.int32), mx.arange(size)[None], mx.full((batch, 2), _IMPOSSIBLE)
        shares = mx.take_along_axis(rows, mx.broadcast_to(path[:, None], (batch, rows.shape[1], size)), axis=-1)
        before = mx.concatenate([path[:, :2], path[:, :-2]], 1)[:, :size]
        jumps = (path != before) & (place >= 2)  # over a blank, between different labels
        reached = mx.where(place < 2, shares[:, 0], _IMPOSSIBLE)
        for frame in range(1, rows.shape[1]):
            one = mx.concatenate([low[:, :1], reached[:, :-1]], 1)
            two = mx.where(jumps, mx.concatenate([low, reached[:, :-2]], 1)[:, :size], _IMPOSSIBLE)
            after = mx.logaddexp(mx.logaddexp(reached, one), two) + shares[:, frame]
            reached = mx.where((logit_lengths > frame)[:, None], after, reached)
        last = 2.0 * label_lengths[:, None]
        ends = (place == last) | (place == last - 1.0)
        return -mx.logsumexp(mx.where(ends, reached, _IMPOSSIBLE), axis=1)

    def linear(self, x: Any, weight: Any, bias: Any, dtype: str | None) -> Any:
        product = x.dtype if dtype is None else getattr(mx, dtype)
        with contextlib.nullcontext() if dtype is None else precision_region(None):
            out = mx.matmul(x.astype(product), weight.astype(product).T)
            return out if bias is None else out + bias.astype(out.dtype)

    def map_chunks(
        self, function: Callable[..., Any], arrays: Sequence[Any], shared: Sequence[Any], axis: int, chunks: int
    ) -> Any:
        length = arrays[0].shape[axis]
        size = max(1, -(-length // chunks))
        wide = [_wide(array) if array.dtype.size < 4 else array for array in shared]

        def rows(first: Any, *integers: Any) -> Any:  # MLX differentiates by every input of a checkpoint
            return mx.checkpoint(lambda x, *own: function(x, *integers, *own))(first, *wide)

        parts = zip(*[mx.split(array, list(range(size, length, size)), axis) for array in arrays], strict=True)
        return mx.concatenate([rows(*part) for part in parts], axis)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        if not isinstance(x, mx.array) and not isinstance(y, mx.array):
            return mx.where(condition, x, y).astype(mx.float32)
        dtype = x.dtype if isinstance(x, mx.array) else y.dtype
        x, y = (value if isinstance(value, mx.array) else mx.array(value, dtype=dtype) for value in (x, y))
        return _select_function(*mx.broadcast_arrays(condition, x, y))

    def sum(self, values: Any, axis: int | None = None) -> Any:
        return mx.sum(_wide(values), axis=axis)

    def mean(self, values: Any, axis: int | None = None) -> Any:
        return mx.mean(_wide(values), axis=axis)


def _select(condition: Any, x: Any, y: Any) -> Any:
    """Select like `mx.where`, whose derivative multiplies by the mask, so that a masked infinity would become NaN."""
    return mx.where(condition, x, y)


def _select_vjp(primals: Any, cotangent: Any, _: Any) -> Any:
    condition, zero = primals[0], mx.zeros_like(cotangent)
    return mx.zeros_like(condition), mx.where(condition, cotangent, zero), mx.where(condition, zero, cotangent)


_select_function: Any = mx.custom_function(_select)
_select_function.vjp(_select_vjp)


def _wide(values: Any) -> Any:
    return (values if isinstance(values, mx.array) else mx.array(np.asarray(values))).astype(mx.float32)

"""The reference backend's losses: float32 inside, on tensors or on plain NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyamp.reference import tensor as ops
from polyamp.reference.tensor import Tensor


class ReferenceLosses:
    """`LossFunctions` for NumPy; a NumPy array in gives a NumPy array out."""

    def mean_squared_error(self, predictions: Any, targets: Any) -> Any:
        difference = _wide(predictions) - _wide(targets)
        return _like(predictions, difference * difference)

    def softmax_cross_entropy(self, logits: Any, labels: Any) -> Any:
        log_probabilities = ops.log_softmax(_wide(logits))
        rows = np.asarray(getattr(labels, "data", labels) if isinstance(labels, Tensor) else labels)
        index = (*np.indices(rows.shape), rows)
        return _like(logits, -log_probabilities[index])

    def sigmoid_cross_entropy(self, logits: Any, targets: Any) -> Any:
        x, z = _wide(logits), _wide(targets)
        magnitude = ops.relu(x) + ops.relu(-x)
        softplus = ops.log(ops.exp(-magnitude) + np.float32(1.0))
        return _like(logits, ops.relu(x) - x * z + softplus)

    def huber(self, predictions: Any, targets: Any, delta: float) -> Any:
        difference = _wide(predictions) - _wide(targets)
        magnitude = ops.relu(difference) + ops.relu(-difference)
        beyond = ops.relu(magnitude - np.float32(delta))
        within = magnitude - beyond
        return _like(predictions, np.float32(0.5) * within * within + np.float32(delta) * beyond)

    def mean(self, values: Any) -> Any:
        return _like(values, ops.mean(_wide(values)))


def _wide(x: Any) -> Tensor:
    x = ops.tensor(x)
    return ops.cast(x, "float32") if x.dtype.kind in "fV" else ops.Tensor(x.data.astype(np.float32))


def _like(source: Any, value: Tensor) -> Any:
    return value if isinstance(source, Tensor) else value.data

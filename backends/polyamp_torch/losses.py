"""The torch backend's losses: torch's own functions on float32, outside any autocast region (S4)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


class TorchLosses:
    """`LossFunctions` over torch."""

    def mean_squared_error(self, predictions: Any, targets: Any) -> Any:
        return functional.mse_loss(_wide(predictions), _wide(targets), reduction="none")

    def softmax_cross_entropy(self, logits: Any, labels: Any) -> Any:
        wide = _wide(logits)
        flat = functional.cross_entropy(wide.reshape(-1, wide.shape[-1]), labels.reshape(-1).long(), reduction="none")
        return flat.reshape(labels.shape)

    def sigmoid_cross_entropy(self, logits: Any, targets: Any) -> Any:
        return functional.binary_cross_entropy_with_logits(_wide(logits), _wide(targets), reduction="none")

    def huber(self, predictions: Any, targets: Any, delta: float) -> Any:
        return functional.huber_loss(_wide(predictions), _wide(targets), reduction="none", delta=delta)

    def mean(self, values: Any) -> Any:
        return _wide(values).mean()


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float()

"""Losses of the torch backend: torch's own functions in float32, outside any autocast region (S4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from polyamp.errors import LossError
from polyamp_torch.arrays import dtype_name, from_numpy
from polyamp_torch.precision.torch_only.float32_islands import without_islands


class TorchLosses:
    """`LossFunctions` for torch."""

    in_float32 = staticmethod(without_islands)  # autocast casts no arithmetic, and runs the functions here in float32

    def wide(self, values: Any, like: torch.Tensor) -> torch.Tensor:
        return _to_float32(_as_tensor(values, like))

    def constant(self, values: Any, like: torch.Tensor) -> torch.Tensor:
        return self.wide(values, like).detach()

    def indices(self, labels: Any, like: torch.Tensor) -> torch.Tensor:
        return (labels if isinstance(labels, torch.Tensor) else _as_tensor(labels, like)).long()

    def on_host(self, labels: Any) -> np.ndarray[Any, Any] | None:
        if isinstance(labels, np.ndarray):
            return labels
        if type(labels) is not torch.Tensor or labels.device.type != "cpu" or torch.compiler.is_compiling():
            return None
        try:
            found: np.ndarray[Any, Any] = labels.numpy()
        except RuntimeError:  # inside one of torch.func's transformations
            return None
        return found

    def classes(self, logits: torch.Tensor) -> int:
        return logits.shape[-1]

    def mean_squared_error(self, predictions: Any, targets: Any) -> Any:
        return functional.mse_loss(_to_float32(predictions), self.wide(targets, predictions), reduction="none")

    def softmax_cross_entropy(self, logits: Any, labels: Any, reduction: str) -> Any:
        wide = _to_float32(logits)
        if wide.dim() != 2:
            wide = wide.reshape(-1, wide.shape[-1])
        flat = functional.cross_entropy(wide, labels.reshape(-1), reduction=reduction)
        return flat.reshape(labels.shape) if reduction == "none" else flat

    def sigmoid_cross_entropy(self, logits: Any, targets: Any) -> Any:
        return functional.binary_cross_entropy_with_logits(
            _to_float32(logits), self.wide(targets, logits), reduction="none"
        )

    def huber(self, predictions: Any, targets: Any, delta: float) -> Any:
        return functional.huber_loss(
            _to_float32(predictions), self.wide(targets, predictions), reduction="none", delta=delta
        )

    def log_softmax(self, logits: torch.Tensor) -> torch.Tensor:
        return functional.log_softmax(_to_float32(logits), dim=-1)

    def pick(self, values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return values.gather(-1, labels[..., None])[..., 0]

    def take(self, values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return values[labels]

    def exp(self, values: torch.Tensor) -> torch.Tensor:
        return torch.exp(_to_float32(values))

    def log(self, values: torch.Tensor) -> torch.Tensor:
        return torch.log(_to_float32(values))

    def diagonal(self, values: torch.Tensor) -> torch.Tensor:
        return values.diagonal()

    def positions(self, values: torch.Tensor, axis: int) -> torch.Tensor:
        return torch.arange(values.shape[axis], device=values.device, dtype=torch.float32)

    def ctc(
        self, logits: torch.Tensor, labels: Any, logit_lengths: Any, label_lengths: Any, blank: int
    ) -> torch.Tensor:
        rows = functional.log_softmax(logits, -1).transpose(0, 1)
        frames, counts = logit_lengths.long(), label_lengths.long()
        return functional.ctc_loss(rows, labels, frames, counts, blank=blank, reduction="none")

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: str | None) -> Any:
        # cast here, not by autocast, whose cache of casts would sum the weight's gradients over chunks in 16 bits
        kind = x.device.type
        if dtype is not None:
            product: torch.dtype = getattr(torch, dtype)
        else:
            product = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        with without_islands(), torch.autocast(kind, enabled=False):
            return functional.linear(x.to(product), weight.to(product), None if bias is None else bias.to(product))

    def map_chunks(
        self, function: Callable[..., Any], arrays: Sequence[Any], shared: Sequence[Any], axis: int, chunks: int
    ) -> torch.Tensor:
        wide = [array.float() if array.dtype.itemsize < 4 else array for array in shared]
        size = max(1, -(-arrays[0].shape[axis] // chunks))
        parts = zip(*[array.split(size, axis) for array in arrays], strict=True)
        return torch.cat(
            [checkpoint(function, *part, *wide, use_reentrant=False, preserve_rng_state=False) for part in parts], axis
        )

    def where(self, condition: torch.Tensor, x: Any, y: Any) -> torch.Tensor:
        if not isinstance(x, torch.Tensor):
            x = torch.full((), x, dtype=torch.float32, device=condition.device)
        return torch.where(condition, x, y)

    def sum(self, values: torch.Tensor, axis: int | None = None) -> torch.Tensor:
        return _to_float32(values).sum() if axis is None else _to_float32(values).sum(axis)

    def mean(self, values: torch.Tensor, axis: int | None = None) -> torch.Tensor:
        return _to_float32(values).mean() if axis is None else _to_float32(values).mean(axis)


def _as_tensor(values: Any, like: torch.Tensor) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values
    array = np.asarray(values)
    if torch.compiler.is_compiling():  # torch traces no dtype of a NumPy array
        return torch.as_tensor(array).to(like.device)
    return from_numpy(array).to(like.device)


def _to_float32(x: torch.Tensor) -> torch.Tensor:
    if x.is_complex():  # .float() would drop the imaginary part
        raise LossError(
            f"polyamp.losses take real tensors. Received: {dtype_name(x.dtype)}. Give torch.view_as_real(x), both "
            "parts of each number, or x.abs()."
        )
    return x.float()

"""Gradient accumulation over micro-batches (S8): float32 sums for 16-bit parameters, the divisor, and stacked aux.

The weights of the micro-batches are in `loss_weights`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from polyamp.errors import BatchError
from polyamp.rules.accumulation import is_concatenated
from polyamp.trees import map_tree


class GradAccumulator:
    """Float32 sums of the gradients of 16-bit parameters.

    Their own `.grad` would lose precision or overflow: in bfloat16 256 + 1 is 256, and in float16 40,000 + 40,000 is
    infinite.

    Args:
        parameters: 16-bit parameters. A micro-batch may leave some without a gradient.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._sums: list[torch.Tensor | None] = [None] * len(parameters)

    @torch.no_grad()
    def add(self) -> None:
        """Add the gradients of the last backward pass, and set the parameters' `.grad` to None."""
        for index, p in enumerate(self._parameters):
            if p.grad is not None:
                total = self._sums[index]
                self._sums[index] = p.grad.float() if total is None else total.add_(p.grad)
                p.grad = None

    @torch.no_grad()
    def write_back(self, by: torch.Tensor) -> None:
        """Write the sums, divided by a scalar and rounded once, to the parameters' `.grad`."""
        for p, total in zip(self._parameters, self._sums, strict=True):
            if total is not None:
                p.grad = torch.empty_like(p).copy_(total.div_(by.to(total.device, torch.float32)))


def total_scale(scale: torch.Tensor | None, total: Any, device: torch.device) -> torch.Tensor | None:
    """Return the divisor of the accumulated scaled gradients: the scale times the sum of the weights.

    The sum is 1.0 for a single micro-batch; in a compiled step it may be a tensor."""
    if isinstance(total, float):
        if total == 1.0:
            return scale
        return torch.full((), total, dtype=torch.float64, device=device) if scale is None else scale.double() * total
    by: torch.Tensor = total if scale is None else scale.double() * total
    return by


def stack_aux(auxes: list[Any], *, stack: bool) -> Any:
    """Return the aux of all micro-batches, with a new leading axis (S8).

    Args:
        auxes: the aux of each micro-batch.
        stack: whether the recipe accumulates; a single micro-batch is then stacked too.
    """
    if not stack or auxes[0] is None:
        return auxes[0]
    return map_tree(_stack_leaves, *auxes)


def _stack_leaves(*leaves: Any) -> Any:
    if leaves[0] is None:
        return None
    try:
        tensors = [torch.as_tensor(leaf) for leaf in leaves]
    except (RuntimeError, TypeError) as error:
        raise BatchError("aux must be tensors or numbers, to be stacked over the micro-batches.") from error
    return torch.cat(tensors) if is_concatenated([tuple(tensor.shape) for tensor in tensors]) else torch.stack(tensors)

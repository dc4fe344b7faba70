"""The numbers of a window of micro-batches (S8): aux, what the sum of the gradients is divided by, and sums in float32
for parameters that are stored in 16 bits. What each micro-batch counts is in `weighing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from polyamp.errors import BatchError
from polyamp.rules.window import joins
from polyamp.trees import map_trees

NARROW: Final = (torch.float16, torch.bfloat16)


class Sums:
    """Float32 sums of the gradients of 16-bit parameters, whose own `.grad` would lose them: in bfloat16 256 + 1 is
    256, and in float16 40,000 + 40,000 is infinite.

    Args:
        parameters: of 16 bits. Those on which a micro-batch does not depend are left out of it.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._sums: list[torch.Tensor | None] = [None] * len(parameters)

    @torch.no_grad()
    def take(self) -> None:
        """Add what the last backward pass left in the parameters' `.grad`, which is None then."""
        for index, p in enumerate(self._parameters):
            if p.grad is not None:
                total = self._sums[index]
                self._sums[index] = p.grad.float() if total is None else total.add_(p.grad)
                p.grad = None

    @torch.no_grad()
    def give(self, by: torch.Tensor) -> None:
        """Put the sums, divided by a scalar and then rounded once, into the parameters' `.grad`."""
        for p, total in zip(self._parameters, self._sums, strict=True):
            if total is not None:
                p.grad = torch.empty_like(p).copy_(total.div_(by.to(total.device, torch.float32)))


def produced_by(scale: torch.Tensor | None, total: Any, device: torch.device) -> torch.Tensor | None:
    """What the sum of the scaled gradients of a window is to be divided by: the scale times the sum of the shares, 1.0
    for a single micro-batch; in a compiled step it may be a tensor."""
    if isinstance(total, float):
        if total == 1.0:
            return scale
        return torch.full((), total, dtype=torch.float64, device=device) if scale is None else scale.double() * total
    by: torch.Tensor = total if scale is None else scale.double() * total
    return by


def stacked(auxes: list[Any], *, stack: bool) -> Any:
    """The aux of a window, with a new leading axis (S8).

    Args:
        auxes: of each micro-batch.
        stack: whether the recipe accumulates; a window of one micro-batch is stacked too then.
    """
    if not stack or auxes[0] is None:
        return auxes[0]
    return map_trees(_stack, auxes)


def _stack(leaves: list[Any]) -> Any:
    if leaves[0] is None:
        return None
    try:
        tensors = [torch.as_tensor(leaf) for leaf in leaves]
    except (RuntimeError, TypeError) as error:
        raise BatchError("aux must be tensors or numbers, to be stacked over the micro-batches.") from error
    return torch.cat(tensors) if joins([tuple(tensor.shape) for tensor in tensors]) else torch.stack(tensors)

"""The numbers of a window of micro-batches (S8): the mean of the losses, what the sum of the gradients is divided by,
and sums in float32 for parameters that are stored in 16 bits. Called by the step and the compiled step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from polyamp.errors import BatchError
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


def produced_by(scale: torch.Tensor | None, count: int, device: torch.device) -> torch.Tensor | None:
    """What the sum of the scaled gradients of `count` micro-batches is to be divided by."""
    if count == 1:
        return scale
    return torch.full((), float(count), device=device) if scale is None else scale.double() * count


def mean_and_stack(losses: list[torch.Tensor], auxes: list[Any]) -> tuple[torch.Tensor, Any]:
    """The loss and aux of a window: the mean over micro-batches, and aux with a new leading axis (S8)."""
    if len(losses) == 1:
        return losses[0], auxes[0]
    return torch.stack(losses).mean(), None if auxes[0] is None else map_trees(_stack, auxes)


def _stack(leaves: list[Any]) -> Any:
    if leaves[0] is None:
        return None
    try:
        return torch.stack([torch.as_tensor(leaf) for leaf in leaves])
    except (RuntimeError, TypeError) as error:
        raise BatchError("aux must be tensors or numbers of one shape in every micro-batch, to be stacked.") from error

"""The single all-reduce of a step: gradient norm, finite flag and loss over all processes (S9).

It sums one float64 vector of a few numbers. Every process reads the same bits and makes the same decision, on unlike
hardware too. If the engine leaves the same gradients in every process, each computes norm and flag locally. Only the
loss is then reduced, while the backward pass runs (`AsyncStepScalars`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class StepScalars(NamedTuple):
    """Reduced scalars of a step, the same on every process.

    Attributes:
        norm: global gradient norm, float64 scalar.
        finite: whether all gradients are finite, boolean scalar.
        loss: weighted mean over the replicas, float32 scalar; 0 if no loss was given, or all weights are 0.
        total: mean of the replicas' loss weights, float64 scalar.
        marks: sum of the processes' program marks, float64 scalar.
        announcements: number of processes that announce parameter writes, float64 scalar.
        scale: the scale that the gradients still carry, or None.
    """

    norm: torch.Tensor
    finite: torch.Tensor
    loss: torch.Tensor
    total: torch.Tensor
    marks: torch.Tensor
    announcements: torch.Tensor
    scale: torch.Tensor | None = None


class AsyncStepScalars:
    """Asynchronous all-reduce of the loss, its weight, the program mark and the flag of announced parameter writes.

    Args:
        loss: weighted sum of the losses of this process's micro-batches.
        total: the sum of their weights.
        group: the process group.
        mark: as in `all_reduce_step_scalars`.
        announced: as in `all_reduce_step_scalars`.
    """

    @torch.no_grad()
    def __init__(
        self, loss: torch.Tensor, total: float | torch.Tensor, group: Any, mark: int, *, announced: bool
    ) -> None:
        self.mark = mark
        own = loss.detach().to(torch.float64) / group.size()
        if isinstance(total, torch.Tensor):
            counted = total.to(own) / group.size()
        else:
            counted = own.new_full((), total / group.size())
        self._sums = torch.stack((own, counted, own.new_full((), mark), own.new_full((), float(announced))))
        self._work: Any = dist.all_reduce(self._sums, group=group, async_op=True)

    def wait(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the mean loss (float32), the mean weight, and the sums of the marks and of the announcements.

        A device waits for the reduction; the host does not."""
        self._work.wait()
        loss, total, marks, announcements = self._sums.unbind()
        return _replica_mean(loss, total), total, marks, announcements


@torch.no_grad()
def all_reduce_step_scalars(
    squares: torch.Tensor,
    finite: torch.Tensor,
    loss: torch.Tensor | None,
    total: float | torch.Tensor,
    group: Any,
    mark: int = 0,
    *,
    announced: bool = False,
) -> StepScalars:
    """Return norm, finite flag and mean loss over all processes, from one small all-reduce.

    Args:
        squares: this process's part of the squared norm, float64 scalar. An element stored in n processes counts 1/n
            in each.
        finite: whether this process's gradients are finite.
        loss: weighted sum of the losses of its micro-batches, or None.
        total: the sum of their weights.
        group: the process group.
        mark: a small number of step, state and gradients that is equal where the programs are equal (S32).
        announced: whether this process announces parameter writes.
    """
    if squares.device.type == "cpu":  # with Python numbers: reading is free, and it takes a fourth of the operations
        own = 0.0 if loss is None else loss.item() / group.size()
        numbers = (squares.item(), not finite.item(), own, float(total) / group.size(), mark, announced)
        vector = torch.tensor(numbers, dtype=torch.float64)
    else:
        zero = torch.zeros_like(squares)
        mean = zero if loss is None else loss.to(squares.device, torch.float64) / group.size()
        vector = torch.stack(
            (squares, (~finite).double(), mean, zero + total / group.size(), zero + mark, zero + float(announced))
        )
    dist.all_reduce(vector, group=group)
    norm, broken, mean, counted, marks, announcements = vector.unbind()
    return StepScalars(norm.sqrt(), broken == 0, _replica_mean(mean, counted), counted, marks, announcements)


def _replica_mean(loss: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return torch.where(total > 0.0, loss / total, torch.zeros_like(loss)).float()


@torch.no_grad()
def all_reduce_max(value: float, group: Any, device: torch.device) -> float:
    """Return the maximum over the processes; the host waits for it."""
    found = torch.full((), value, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return found.item()


@torch.no_grad()
def all_reduce_sum(values: Sequence[float | torch.Tensor], group: Any, device: torch.device) -> torch.Tensor:
    """Return the element-wise sums over the processes, a float64 vector."""
    own = [torch.as_tensor(value, dtype=torch.float64, device=device) for value in values]
    vector = torch.stack(own)
    dist.all_reduce(vector, group=group)
    return vector

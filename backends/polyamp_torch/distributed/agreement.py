"""The one small reduction of a step: the gradients' norm, their finite flag and the loss, over all processes (S9).

One float64 vector of a few numbers, summed, so that every process reads the same bits and so decides the same, on
unlike hardware too. Where the engine leaves the same gradients in every process each measures them by itself, and what
is still to be summed, the loss, is under way while the backward pass runs (`begun`). Called by `step.replicas`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Agreed(NamedTuple):
    """What all processes read.

    Attributes:
        norm: of the gradients of all of them, float64 scalar.
        finite: whether all are finite, boolean scalar.
        loss: the mean over the replicas by what they count, float32 scalar; 0 where no loss was given, or none counts.
        total: the mean over the replicas of what they count, float64 scalar.
        marks: the sum of what each says of its program, float64 scalar.
        news: how many of them have something to say of parameters that they wrote to, float64 scalar.
        scale: what the gradients are still multiplied by, or None.
    """

    norm: torch.Tensor
    finite: torch.Tensor
    loss: torch.Tensor
    total: torch.Tensor
    marks: torch.Tensor
    news: torch.Tensor
    scale: torch.Tensor | None = None


class Begun:
    """The sums of the loss, of what it counts, of the mark and of the news, on their way.

    Args:
        loss: of this process's micro-batches, times what they count.
        total: the sum of what they count.
        group: the processes.
        mark: as in `agreed`.
        news: as in `agreed`.
    """

    @torch.no_grad()
    def __init__(self, loss: torch.Tensor, total: float | torch.Tensor, group: Any, mark: int, *, news: bool) -> None:
        self.mark = mark
        own = loss.detach().to(torch.float64) / group.size()
        if isinstance(total, torch.Tensor):
            counted = total.to(own) / group.size()
        else:
            counted = own.new_full((), total / group.size())
        self._sums = torch.stack((own, counted, own.new_full((), mark), own.new_full((), float(news))))
        self._work: Any = dist.all_reduce(self._sums, group=group, async_op=True)

    def arrived(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The mean loss, float32, the mean of what is counted, and the sums of the marks and of the news, float64
        scalars; a device waits for them by itself."""
        self._work.wait()
        loss, total, marks, news = self._sums.unbind()
        return _mean(loss, total), total, marks, news


@torch.no_grad()
def agreed(
    squares: torch.Tensor,
    finite: torch.Tensor,
    loss: torch.Tensor | None,
    total: float | torch.Tensor,
    group: Any,
    mark: int = 0,
    *,
    news: bool = False,
) -> Agreed:
    """Norm, flag and mean loss over all processes, in one small reduction.

    Args:
        squares: this process's share of the squared norm, float64 scalar: what lies in several processes counts in
            each by its part.
        finite: whether the gradients that it holds are.
        loss: of its micro-batches, times what they count, or None.
        total: the sum of what they count.
        group: the processes.
        mark: a small number that is the same where programs are: of the step, the state and the gradients (S32).
        news: whether this process has something to say of parameters that it wrote to.
    """
    if squares.device.type == "cpu":  # over Python's numbers, where reading costs nothing: a fourth of the operations
        own = 0.0 if loss is None else loss.item() / group.size()
        numbers = (squares.item(), float(not finite.item()), own, float(total) / group.size(), float(mark), float(news))
        vector = torch.tensor(numbers, dtype=torch.float64)
    else:
        zero = torch.zeros_like(squares)
        mean = zero if loss is None else loss.to(squares.device, torch.float64) / group.size()
        vector = torch.stack(
            (squares, (~finite).double(), mean, zero + total / group.size(), zero + mark, zero + float(news))
        )
    dist.all_reduce(vector, group=group)
    norm, broken, mean, counted, marks, told = vector.unbind()
    return Agreed(norm.sqrt(), broken == 0, _mean(mean, counted), counted, marks, told)


def _mean(loss: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return torch.where(total > 0.0, loss / total, torch.zeros_like(loss)).float()


@torch.no_grad()
def largest(value: float, group: Any, device: torch.device) -> float:
    """The largest of the processes' numbers; the host waits for it."""
    found = torch.full((), value, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return found.item()


@torch.no_grad()
def summed(values: Sequence[float | torch.Tensor], group: Any, device: torch.device) -> torch.Tensor:
    """The sums of the processes' numbers, a float64 vector."""
    own = [torch.as_tensor(value, dtype=torch.float64, device=device) for value in values]
    vector = torch.stack(own)
    dist.all_reduce(vector, group=group)
    return vector

"""The one small reduction of a step: the gradients' norm, their finite flag and the loss, over all processes (S9).

One float64 vector of four numbers, summed, so that every process reads the same bits and so decides the same, on
unlike hardware too. Where the engine leaves the same gradients in every process each measures them by itself, and what
is still to be summed, the loss, is under way while the backward pass runs (`begun`). Called by `step.replicas`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Agreed(NamedTuple):
    """What all processes read.

    Attributes:
        norm: of the gradients of all of them, float64 scalar.
        finite: whether all are finite, boolean scalar.
        loss: the mean over the replicas, float32 scalar; 0 where no loss was given.
        marks: the sum of what each says of its program, float64 scalar.
    """

    norm: torch.Tensor
    finite: torch.Tensor
    loss: torch.Tensor
    marks: torch.Tensor


class Begun:
    """The sums of the loss and the mark, on their way.

    Args:
        loss: of this process's batch.
        group: the processes.
        mark: as in `agreed`.
    """

    @torch.no_grad()
    def __init__(self, loss: torch.Tensor, group: Any, mark: int) -> None:
        self.mark = mark
        own = loss.detach().to(torch.float64) / group.size()
        self._sums = torch.stack((own, own.new_full((), mark)))
        self._work: Any = dist.all_reduce(self._sums, group=group, async_op=True)

    def arrived(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean loss, float32, and the sum of the marks, float64 scalars; a device waits for them by itself."""
        self._work.wait()
        mean, marks = self._sums.unbind()
        return mean.float(), marks


@torch.no_grad()
def agreed(squares: torch.Tensor, finite: torch.Tensor, loss: torch.Tensor | None, group: Any, mark: int = 0) -> Agreed:
    """The sums over a group.

    Args:
        squares: this process's share of the squared norm, float64 scalar: what lies in several processes counts in
            each by its part.
        finite: whether the gradients that it holds are.
        loss: of its batch, or None.
        group: the processes.
        mark: a small number that is the same where programs are: of the step, the state and the gradients (S32).
    """
    if squares.device.type == "cpu":
        return _on_the_host(squares, finite, loss, group, mark)
    own = torch.zeros_like(squares) if loss is None else loss.to(squares.device, torch.float64) / group.size()
    vector = torch.stack((squares, (~finite).double(), own, squares.new_full((), mark)))
    dist.all_reduce(vector, group=group)
    norm, broken, mean, marks = vector.unbind()
    return Agreed(norm.sqrt(), broken == 0, mean.float(), marks)


def _on_the_host(
    squares: torch.Tensor, finite: torch.Tensor, loss: torch.Tensor | None, group: Any, mark: int
) -> Agreed:
    """The same over Python's numbers, where reading costs nothing: a fourth of the operations."""
    own = 0.0 if loss is None else loss.item() / group.size()
    vector = torch.tensor((squares.item(), float(not finite.item()), own, float(mark)), dtype=torch.float64)
    dist.all_reduce(vector, group=group)
    norm, broken, mean, marks = vector.unbind()
    return Agreed(norm.sqrt(), broken == 0, mean.float(), marks)

"""What forward passes write to parameters becomes rank 0's on every rank, as running statistics do (S9, S12).

The update is the same on all ranks and adds to what was written, so the values are sent before it. Which parameters are
sent is agreed on once: a rank that wrote to others says so by one number of the step's reduction. Where a model's
passes write to none, nothing is sent.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch

from polyamp.errors import UnsupportedError
from polyamp_torch.compat import local_of
from polyamp_torch.step.measure import looks
from polyamp_torch.step.state import TorchState


class WrittenHere(Protocol):
    """What one rank's passes wrote to parameters, which are as the passes left them."""

    @property
    def found(self) -> list[str]:
        """The paths."""

    def keep(self, names: Collection[str]) -> None:
        """Keep the values of others, to which another rank's may be given, for a step that is skipped."""


def news(state: TorchState, names: Collection[str]) -> bool:
    """Whether a rank has something to say of the parameters that it wrote to.

    Args:
        state: of the passes.
        names: the parameters.
    """
    if not state.replicas.several or state.replicas.data is None:
        return False
    return any(name not in state.writes.agreed and _is_whole(state, name) for name in names)


def send_writes(
    state: TorchState, written: WrittenHere, *, announced: bool, of_all: torch.Tensor, finite: torch.Tensor
) -> None:
    """Give every rank the values that rank 0's passes left in parameters that passes write to.

    Args:
        state: whose gradients are reduced, and whose update is still to come.
        written: by this rank.
        announced: what `news` gave before the reduction.
        of_all: how many ranks announced something.
        finite: the flag of the gradients, the same on all ranks.

    Raises:
        UnsupportedError: a write that not all ranks know of, and that cannot be taken back to rank 0's.
    """
    replicas, agreed = state.replicas, state.writes.agreed
    if replicas.data is None:
        return
    reads = looks(of_all.device)
    if reads and state.scaler.checks and not bool(finite):
        return  # every rank takes its own writes back
    size, told = replicas.group.size(), round(of_all.item()) if reads or announced else 0
    refusal = None
    if told == size or (told and reads):
        agreed.update(_of_any(state, written.found, of_all.device))
    elif told:
        refusal = _on_some(state, written.found, told, size)
    elif news(state, written.found):
        refusal = _in_backward(state, written.found)
    if agreed:
        from polyamp_torch.distributed.compat import send

        names = sorted(agreed)
        written.keep(names)
        tensors = [state.writes.named[name].detach() for name in names]
        sent = [tensor.clone() for tensor in tensors]  # what is written by `copy_` moves its version, for mode "cast"
        send(replicas.data, sent)
        if replicas.rank != 0:
            for tensor, value in zip(tensors, sent, strict=True):
                tensor.copy_(value)
    if refusal is not None:  # when no other rank waits for this one any more
        raise UnsupportedError(refusal)


def _of_any(state: TorchState, found: Collection[str], device: torch.device) -> list[str]:
    """The parameters that any of the ranks wrote to."""
    import torch.distributed as dist

    names, own = state.writes.names, set(found)
    marks = [int(name in own and _is_whole(state, name)) for name in names]
    vector = torch.tensor(marks, dtype=torch.int32, device=device)
    dist.all_reduce(vector, op=dist.ReduceOp.MAX, group=state.replicas.group)
    return [name for name, mark in zip(names, vector.tolist(), strict=True) if mark]


def _is_whole(state: TorchState, name: str) -> bool:
    p = state.writes.named[name]
    return local_of(p) is p


def _first(state: TorchState, found: Collection[str]) -> str:
    return next((name for name in found if name not in state.writes.agreed), next(iter(found), "?"))


def _in_backward(state: TorchState, found: Collection[str]) -> str:
    return (
        f"rank {state.replicas.rank} wrote to the parameter {_first(state, found)!r} in the backward pass, or behind "
        "it. What is written there is each rank's own, and the replicas would part (S9): writes of the forward pass "
        "are sent from rank 0. Write to it in the model's forward(), or between two steps."
    )


def _on_some(state: TorchState, found: Collection[str], number: int, size: int) -> str:
    return (
        f"the forward pass wrote to the parameter {_first(state, found)!r} for the first time on {number} of {size} "
        "ranks. What is written is rank 0's on all ranks (S9), and the others do not know of it: on this device a step "
        "does not wait for what they say. Write to it on every rank in the first pass as well, even if that changes "
        "nothing."
    )

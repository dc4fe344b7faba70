"""Broadcast of rank 0's parameter writes: every rank gets the values that its forward passes wrote (S9, S12).

Running statistics are treated in the same way. The update is the same on all ranks and adds to the written values, so
they are broadcast before it. The ranks agree once on the parameters to send. A rank that writes to others announces it
by one number of the step's all-reduce. If the passes of a model write to no parameters, nothing is sent.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from polyamp.errors import UnsupportedError
from polyamp_torch.arrays import can_read_without_sync
from polyamp_torch.compat import local_tensor_of
from polyamp_torch.step.parameter_writes import ParameterWrites
from polyamp_torch.step.state import TorchState


def has_unannounced_writes(state: TorchState, names: Collection[str]) -> bool:
    """Return whether this rank wrote to parameters that the ranks have not agreed to send.

    Args:
        state: the state of the passes.
        names: the parameters written to.
    """
    if not state.replicas.several or state.replicas.data is None:
        return False
    return any(name not in state.writes.agreed and _is_unsharded(state, name) for name in names)


def broadcast_writes(
    state: TorchState, written: ParameterWrites, announcements: torch.Tensor, *, announced: bool, finite: torch.Tensor
) -> None:
    """Broadcast rank 0's values of the parameters that passes write to.

    Args:
        state: a state after the reduction of its gradients and before its update.
        written: the writes of this rank.
        announcements: the number of ranks that announced writes, on their device.
        announced: the result of `has_unannounced_writes` before the reduction.
        finite: the flag of the gradients, the same on all ranks.

    Raises:
        UnsupportedError: not all ranks know of a write, so it cannot be replaced by rank 0's value.
    """
    replicas, agreed = state.replicas, state.writes.agreed
    if replicas.data is None:
        return
    reads = can_read_without_sync(announcements.device)
    if reads and state.scaler.checks and not bool(finite):
        return  # every rank undoes its own writes
    size, writers = replicas.group.size(), round(announcements.item()) if reads or announced else 0
    refusal = None
    if writers == size or (writers and reads):
        agreed.update(_names_on_any_rank(state, written.found, announcements.device))
    elif writers:
        refusal = _partial_write_message(state, written.found, writers, size)
    elif has_unannounced_writes(state, written.found):
        refusal = _backward_write_message(state, written.found)
    if agreed:
        from polyamp_torch.distributed.torch_only.compat import broadcast_coalesced

        names = sorted(agreed)
        written.keep(names)
        tensors = [state.writes.named[name].detach() for name in names]
        sent = [tensor.clone() for tensor in tensors]  # `copy_` below increases the version, for mode "cast"
        broadcast_coalesced(replicas.data, sent)
        if replicas.rank != 0:
            for tensor, value in zip(tensors, sent, strict=True):
                tensor.copy_(value)
    if refusal is not None:  # now that no other rank waits for this one
        raise UnsupportedError(refusal)


def _names_on_any_rank(state: TorchState, found: Collection[str], device: torch.device) -> list[str]:
    """Return the parameters that any rank wrote to."""
    import torch.distributed as dist

    names, own = state.writes.names, set(found)
    marks = [int(name in own and _is_unsharded(state, name)) for name in names]
    vector = torch.tensor(marks, dtype=torch.int32, device=device)
    dist.all_reduce(vector, op=dist.ReduceOp.MAX, group=state.replicas.group)
    return [name for name, mark in zip(names, vector.tolist(), strict=True) if mark]


def _is_unsharded(state: TorchState, name: str) -> bool:
    p = state.writes.named[name]
    return local_tensor_of(p) is p


def _first_unannounced(state: TorchState, found: Collection[str]) -> str:
    return next((name for name in found if name not in state.writes.agreed), next(iter(found), "?"))


def _backward_write_message(state: TorchState, found: Collection[str]) -> str:
    return (
        f"rank {state.replicas.rank} wrote to the parameter {_first_unannounced(state, found)!r} in the backward pass, "
        "or behind it. What is written there is each rank's own, and the replicas would part (S9): writes of the "
        "forward pass are sent from rank 0. Write to it in the model's forward(), or between two steps."
    )


def _partial_write_message(state: TorchState, found: Collection[str], number: int, size: int) -> str:
    return (
        f"the forward pass wrote to the parameter {_first_unannounced(state, found)!r} for the first time on {number} "
        f"of {size} ranks. What is written is rank 0's on all ranks (S9), and the others do not know of it: on this "
        "device a step does not wait for what they say. Write to it on every rank in the first pass as well, even if "
        "that changes nothing."
    )

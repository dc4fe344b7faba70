"""Sharded tensors of a step: redistribution of gradients, local parts, and the number of copies of an element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from polyamp_torch.compat import local_tensor_of


def redistribute_gradients(named: Mapping[str, torch.Tensor]) -> None:
    """Redistribute gradients to the placements of their parameters.

    Needed for partial sums, for example of a norm layer in a sequence-parallel model."""
    for p in named.values():
        grad = p.grad
        if isinstance(grad, DTensor) and isinstance(p, DTensor) and grad.placements != p.placements:
            p.grad = grad.redistribute(p.device_mesh, p.placements)


def local_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return this process's local part of each tensor."""
    return [_wait_for_collective(local_tensor_of(tensor)) for tensor in tensors]


def _wait_for_collective(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for the collective that fills a tensor; return the tensor."""
    wait = getattr(tensor, "wait", None)
    return tensor if wait is None else wait()


def replication_factor(p: torch.Tensor, group: Any) -> int:
    """Return how many processes of a group store each element of a parameter."""
    if not isinstance(p, DTensor):
        return int(group.size())
    different = 1
    for size, placement in zip(p.device_mesh.shape, p.placements, strict=True):
        different *= 1 if placement.is_replicate() else size
    return int(group.size()) // different

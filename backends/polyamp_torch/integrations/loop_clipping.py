"""Gradient clipping over gradients with different shardings, for loops that leave clipping to their plugin.

torch's own functions require gradients with one kind of sharding. Under a tensor-parallel plan some gradients are
sharded and some are not, or they are sharded over several meshes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def group_by_mesh(parameters: Iterable[Any]) -> dict[Any, list[Any]]:
    """Group the parameters that have a gradient by the mesh that shards it; None for unsharded gradients."""
    found: dict[Any, list[Any]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            found.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    return found


def clip_by_norm(parameters: Iterable[Any], max_norm: float) -> None:
    """Clip like `torch.nn.utils.clip_grad_norm_`, by the norm over all gradients, which is equal on every rank."""
    found = group_by_mesh(parameters)
    if len(found) < 2:
        nn.utils.clip_grad_norm_([p for alike in found.values() for p in alike], max_norm)
        return
    norms = [nn.utils.get_total_norm([p.grad for p in alike]) for alike in found.values()]
    whole = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(whole))
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as in torch
    for alike in found.values():
        for parameter in alike:
            parameter.grad.mul_(factor)

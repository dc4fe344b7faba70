"""Clipping for the loops of libraries that leave it to their plugin, over gradients that lie in ranks in several ways.

torch's own functions take gradients of one kind: under a tensor-parallel plan some are sharded and some are not, or
they are sharded over several meshes. Called by `lightning`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def by_mesh(parameters: Iterable[Any]) -> dict[Any, list[Any]]:
    """The parameters that have a gradient, by the mesh that it is sharded over; None for those of one process."""
    found: dict[Any, list[Any]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            found.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    return found


def clip_by_norm(parameters: Iterable[Any], max_norm: float) -> None:
    """`torch.nn.utils.clip_grad_norm_` by the norm over all of them, which is one number on every rank."""
    found = by_mesh(parameters)
    if len(found) < 2:
        nn.utils.clip_grad_norm_([p for alike in found.values() for p in alike], max_norm)
        return
    norms = [nn.utils.get_total_norm([p.grad for p in alike]) for alike in found.values()]
    whole = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(whole))
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as torch has it
    for alike in found.values():
        for parameter in alike:
            parameter.grad.mul_(factor)

"""Norms and finite flag of gradients over several processes, with the scalars of the single all-reduce (S9)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from polyamp_torch.arrays import can_read_without_sync
from polyamp_torch.distributed.all_reduce import AsyncStepScalars, StepScalars, all_reduce_step_scalars, all_reduce_sum
from polyamp_torch.distributed.replicas import ScalarOrTensor, TorchReplicas
from polyamp_torch.step.grad_stats import global_norm_and_finite


class LocalStepScalars(NamedTuple):
    """This process's scalars for the single all-reduce of a step.

    Attributes:
        loss: the weighted sum of its losses, or None.
        total: the sum of the weights.
        divided: the divisor already applied to the gradients.
        announced: whether this process announces parameter writes.
    """

    loss: torch.Tensor | None = None
    total: ScalarOrTensor = 1.0
    divided: float = 1.0
    announced: bool = False


def reduce_step_scalars(
    replicas: TorchReplicas,
    parameters: list[torch.Tensor],
    grads: list[torch.Tensor],
    scale: torch.Tensor | None,
    own: LocalStepScalars,
    started: AsyncStepScalars | None = None,
    **how: Any,
) -> StepScalars:
    """Return norm, flag and mean loss over all processes, from one small all-reduce.

    Args:
        replicas: several processes.
        parameters: the parameters that have gradients.
        grads: the local parts of these gradients, in the same order.
        scale: the scale of the gradients, without the loss weights, or None.
        own: this process's scalars.
        started: the result of `start_reduction`. If given, gradients are the same in all processes, and each computes
            norm and flag locally.
        **how: options of `global_norm_and_finite`.

    Raises:
        PartedError: the processes are in different steps, or have gradients of different parameters. Detected only if
            reading a scalar needs no synchronisation.
    """
    if started is not None:
        loss, total, marks, announcements = started.wait()
        scale = _replica_scale(scale, total, own.divided)
        norm, finite = global_norm_and_finite(grads, scale, **how)
        replicas.check_marks(marks, started.mark, len(grads))
        return StepScalars(norm, finite, loss, total, marks, announcements, scale)
    squares, finite = _local_squares(replicas, parameters, grads, scale, **how)
    mark = replicas.mark(len(grads))
    found = all_reduce_step_scalars(squares, finite, own.loss, own.total, replicas.group, mark, announced=own.announced)
    replicas.check_marks(found.marks, mark, len(grads))
    by = _replica_scale(None, found.total, own.divided)
    if by is None:
        return found._replace(scale=scale)
    norm = found.norm / by
    finite = found.finite & torch.isfinite(norm.float())  # else a quotient beyond float32 would be written
    return found._replace(norm=norm, finite=finite, scale=_replica_scale(scale, found.total, own.divided))


def global_norms(
    replicas: TorchReplicas, members: Sequence[tuple[list[torch.Tensor], list[torch.Tensor]]], **how: Any
) -> list[torch.Tensor]:
    """Return the norms of several sets of gradients over all processes, float64 scalars, by one all-reduce.

    Args:
        replicas: the processes of the state.
        members: for each set its parameters, and the local parts of their gradients.
        **how: options of `global_norm_and_finite`.
    """
    if not replicas.several or replicas.engine.has_equal_gradients:
        return [global_norm_and_finite(grads, **how).norm for _, grads in members]
    squares = [_local_squares(replicas, parameters, grads, None, **how)[0] for parameters, grads in members]
    return list(all_reduce_sum(squares, replicas.group, squares[0].device).sqrt())


def _local_squares(
    replicas: TorchReplicas,
    parameters: list[torch.Tensor],
    grads: list[torch.Tensor],
    scale: torch.Tensor | None,
    **how: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this process's part of the squared norm (float64 scalar), and its finite flag."""
    device = grads[0].device
    classes: dict[float, list[torch.Tensor]] = {}
    for p, grad in zip(parameters, grads, strict=True):
        if grad.numel():
            classes.setdefault(replicas.parts[id(p)], []).append(grad)
    shares, flags = [], []
    for part, members in classes.items():
        norm, flag = global_norm_and_finite(members, scale, **how)
        shares.append(norm.to(device, torch.float64).square() * part)
        flags.append(flag.to(device))
    if not shares:  # all local shards are empty
        shares = [torch.zeros((), dtype=torch.float64, device=device)]
        flags = [torch.ones((), dtype=torch.bool, device=device)]
    squares = shares[0] if len(shares) == 1 else torch.stack(shares).sum()
    return squares, flags[0] if len(flags) == 1 else torch.stack(flags).all()


def _replica_scale(scale: torch.Tensor | None, total: torch.Tensor, divided: float) -> torch.Tensor | None:
    """Return the divisor of the gradients: the scale times the replicas' mean weight, or the scale if that is 0.

    `divided` divides the weight. Where reading it needs no synchronisation, a weight of 1 is omitted."""
    by = torch.where(total > 0.0, total, torch.ones_like(total)) / divided
    if can_read_without_sync(by.device) and by.item() == 1.0:
        return scale
    return by if scale is None else scale.to(by.device, torch.float64) * by

"""A training step in torch, by hand and with polyamp: what `step`, `workloads` and `peers` compare.

The handwritten one is a careful user's: fused optimizer, `torch.autocast` around the forward pass alone, `GradScaler`
in float16, the list of parameters made once, nothing read on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

import polyamp
from benchmarks.common import workloads
from benchmarks.common.paired_timing import Step
from benchmarks.common.workloads import Workload
from benchmarks.torch import models

Loss = Callable[[Any, Any], torch.Tensor]
"""`(model, batch) -> loss`."""


class Variant(NamedTuple):
    """How a workload is trained.

    Attributes:
        dtype: of `workloads.DTYPES`.
        clip_norm: the largest norm, or None.
        accumulate: micro-batches of an update.
    """

    dtype: str
    clip_norm: float | None = None
    accumulate: int = 1

    def __str__(self) -> str:
        clipped = "" if self.clip_norm is None else ", clip"
        return f"{self.dtype}{clipped}{f', accumulate {self.accumulate}' if self.accumulate > 1 else ''}"


class Training(NamedTuple):
    """One side of a comparison.

    Attributes:
        step: makes one update and returns the loss: a tensor, or one for each micro-batch.
        model: what it trains.
    """

    step: Step
    model: nn.Module


def by_hand(
    model: nn.Module,
    batches: Sequence[Any],
    loss_fn: Loss,
    optimizer: torch.optim.Optimizer,
    dtype: str,
    *,
    clip_norm: float | None = None,
    scaler: Any = None,
) -> Step:
    """The handwritten step over micro-batches; `scaler` is a `torch.amp.GradScaler`, or None."""
    parameters = list(model.parameters())
    kind, count = parameters[0].device.type, len(batches)
    compute = getattr(torch, dtype)

    def step() -> list[torch.Tensor]:
        losses = []
        optimizer.zero_grad()
        for batch in batches:
            with torch.autocast(kind, dtype=compute if compute != torch.float32 else None, enabled=dtype != "float32"):
                loss = loss_fn(model, batch)
            losses.append(loss.detach())
            part = loss / count if count > 1 else loss
            (part if scaler is None else scaler.scale(part)).backward()
        if clip_norm is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, clip_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        return losses

    return step


def library(model: nn.Module, batches: Sequence[Any], loss_fn: Loss, *, how: Any = False, **recipe: Any) -> Step:
    """The same with polyamp; `how` is the step's `compile`."""
    made = polyamp.Recipe(accumulate_steps=len(batches), **recipe)
    state = polyamp.init(model, made)
    step = polyamp.train_step(loss_fn, made, compile=how)
    batch = list(batches) if len(batches) > 1 else batches[0]
    return lambda: step(state, batch)[1].loss


def native_scaler(scale: float = workloads.INIT_SCALE) -> torch.amp.GradScaler:
    """torch's own."""
    return torch.amp.GradScaler(models.device().type, init_scale=scale)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """torch's fused AdamW at the workloads' rate."""
    return torch.optim.AdamW(model.parameters(), workloads.LEARNING_RATE, fused=True)


def micro_batches(workload: Workload, count: int, *, whole: bool = True) -> list[models.Batch]:
    """The workload's batch in `count` parts; with `whole=False` the batch itself, `count` times."""
    inputs, targets = models.batch(workload)
    if not whole:
        return [(inputs, targets)] * count
    return list(zip(inputs.chunk(count), targets.chunk(count), strict=True))


def workload_by_hand(workload: Workload, variant: Variant, batches: Sequence[Any]) -> Training:
    """A workload trained by hand."""
    model = models.build(workload)
    step = by_hand(
        model,
        batches,
        models.loss_fn,
        adamw(model),
        variant.dtype,
        clip_norm=variant.clip_norm,
        scaler=native_scaler() if variant.dtype == "float16" else None,
    )
    return Training(step, model)


def workload_with_polyamp(
    workload: Workload, variant: Variant, batches: Sequence[Any], *, op_list: str = "polyamp"
) -> Training:
    """A workload trained by polyamp."""
    model = models.build(workload)
    step = library(
        model,
        batches,
        models.loss_fn,
        policy=polyamp.Policy(workloads.DTYPES[variant.dtype], op_list=op_list),
        optimizer=polyamp.adamw(workloads.LEARNING_RATE),
        clip_norm=variant.clip_norm,
        scaler=polyamp.LossScaler(init_scale=workloads.INIT_SCALE) if variant.dtype == "float16" else None,
    )
    return Training(step, model)


def losses(step: Step, count: int = workloads.CHECKED_STEPS) -> list[float]:
    """The losses of the next `count` steps."""
    found = []
    for _ in range(count):
        loss = step()
        parts = [float(part) for part in (loss if isinstance(loss, list) else [loss])]
        found.append(sum(parts) / len(parts))
    return found

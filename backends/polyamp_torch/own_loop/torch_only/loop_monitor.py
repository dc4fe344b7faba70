"""`LoopMonitor`: gives the steps of a loop of the user's own, around a `GradScaler`, to a `polyamp.Monitor` (S35)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaleState
from polyamp.results import StepResult
from polyamp_torch.arrays import to_numpy
from polyamp_torch.own_loop.torch_only.parameter_shards import ParameterShards
from polyamp_torch.step.monitor_slots import MonitoredUpdate

if TYPE_CHECKING:
    from polyamp.monitor.monitor import Monitor


class LoopMonitor:
    """What a loop tells a monitor: the losses that are scaled, the gradients before a step, and what was decided.

    One iteration is what lies between two calls of `update()`. All parameters of the model are measured before the
    first of its gradients is unscaled, and compared with what they are at `update()`. Its loss is the sum of the
    losses, which are parts of one where a loop accumulates. Shards are counted where they are and added up.

    Args:
        model: whose parameters are read.
        monitor: the monitor.
        recipe: policy under which the loop computes, whose compute dtype gradients are judged in; and the scaler.
        mean_over_ranks: returns the mean of a scalar over the processes that train replicas; None for one process.

    Raises:
        UnsupportedError: parameters of FSDP1, or the monitor reads activations.
    """

    def __init__(
        self,
        model: nn.Module,
        monitor: Monitor,
        recipe: Recipe,
        mean_over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        parameters = {
            name.removeprefix("module.").replace(".", "/"): p for name, p in model.named_parameters() if p.requires_grad
        }
        self._shards = ParameterShards(parameters)
        self.monitor = monitor
        self._selection = monitor.loop_selection()
        self._parameters = parameters
        self._recipe = recipe
        self._mean_over_ranks = mean_over_ranks
        self._loss: torch.Tensor | None = None
        self._update: MonitoredUpdate | None = None
        self._view: Any = None
        self._due: bool | None = None

    def see_loss(self, loss: torch.Tensor) -> None:
        """Take a tensor that is scaled; the scalars of an iteration are its loss."""
        if loss.numel() == 1:
            part = loss.detach().reshape(())
            self._loss = part if self._loss is None else self._loss + part

    def begin_update(self, state: LossScaleState, carried: torch.Tensor | None) -> None:
        """Measure the gradients, whose factor is `carried`; None for 1. A second call in an iteration does nothing."""
        if self._due is not None:
            return
        self._due = self.monitor.begin_call()
        if not self._due:
            return
        self._view = self._state_view(state)
        self._update = MonitoredUpdate(self._view, self._selection)
        self._shards.complete_gradients()
        grads = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        self._norm = _global_norm(grads, self._shards, carried, state.scale)
        self._update.measure(grads, carried)

    def end_iteration(self, state: LossScaleState, found: torch.Tensor) -> None:
        """Give the iteration to the monitor, once the scale is adjusted; `found` is 1 if it was skipped."""
        due, self._due = self._due, None
        if due is None:
            return
        zero = torch.zeros_like(state.scale)
        result = StepResult(
            loss=self._iteration_loss(zero) if due else zero,
            aux=None,
            grad_norm=self._norm if due else zero,
            scale=state.scale.clone(),
            skipped=found > 0.0,
            step=torch.full_like(state.skipped, self.monitor.calls) - state.skipped,
            monitor=self._update.finish(self._view) if due and self._update is not None else None,
        )
        self.monitor.end_call(self._state_view(state), result, due=due)
        self._loss = self._update = None

    def _iteration_loss(self, zero: torch.Tensor) -> torch.Tensor:
        """Return the loss of the iteration, over all ranks; NaN if none was scaled."""
        loss = torch.full_like(zero, torch.nan) if self._loss is None else self._loss.float().clone()
        return loss if self._mean_over_ranks is None else self._mean_over_ranks(loss)

    def _state_view(self, state: LossScaleState) -> Any:
        """Return what is read of a state: parameters, scale, and the names that a record is made with."""
        return SimpleNamespace(
            device=state.scale.device,
            scale_state=state,
            parameters=self._parameters,
            replicas=self._shards,
            plain=self._shards.plain,
            backend=SimpleNamespace(name="torch", to_numpy=to_numpy),
            recipe=self._recipe,
            groups=SimpleNamespace(numbers=dict.fromkeys(self._parameters, 0)),
        )


@torch.no_grad()
def _global_norm(
    grads: Mapping[str, torch.Tensor], shards: ParameterShards, carried: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor:
    """Return the norm of the unscaled gradients over all processes, float32 scalar on the device of `like`."""
    parts, squares = shards.parts_by_name(grads), torch.zeros((), dtype=torch.float64, device=like.device)
    if grads:
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in shards.plain(list(grads.values()))]
        own = [norm.square().to(like.device) * parts.get(name, 1.0) for name, norm in zip(grads, norms, strict=True)]
        squares = torch.stack(own).sum()
    norm: torch.Tensor = shards.all_reduce_vector(squares).sqrt()
    return (norm if carried is None else norm / carried.double()).float()

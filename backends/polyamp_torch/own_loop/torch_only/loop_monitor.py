"""`LoopMonitor`: gives the steps of a loop of the user's own, around a `GradScaler`, to a `polyamp.Monitor` (S35)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from polyamp.errors import UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaler, LossScaleState
from polyamp.results import StepResult
from polyamp_torch.arrays import to_numpy
from polyamp_torch.compat import local_tensor_of
from polyamp_torch.step.monitor_slots import MonitoredUpdate

if TYPE_CHECKING:
    from polyamp.monitor.monitor import Monitor


class LoopMonitor:
    """What a scaler tells a monitor: the loss that is scaled, the gradients before a step, and what it decided.

    One iteration is what lies between two calls of `update()`. All parameters of the model are measured at its first
    `step()`, and compared with what they are at `update()`.

    Args:
        model: whose parameters are read.
        monitor: the monitor.
        policy: under which the loop computes; its compute dtype is the one that gradients are judged in.
        scaler: the scaler's constants.

    Raises:
        UnsupportedError: a parameter is sharded.
    """

    def __init__(self, model: nn.Module, monitor: Monitor, policy: Policy, scaler: LossScaler) -> None:
        parameters = {
            name.removeprefix("module.").replace(".", "/"): p for name, p in model.named_parameters() if p.requires_grad
        }
        for name, p in parameters.items():
            if local_tensor_of(p) is not p:
                raise UnsupportedError(
                    f"watch(monitor=...) reads parameters that are whole in every process. Received: {name!r}, which "
                    "is sharded. polyamp.train_step(..., monitor=monitor) reads sharded ones."
                )
        self.monitor = monitor
        self._parameters = parameters
        self._recipe = Recipe(policy=policy, scaler=scaler)
        self._loss: torch.Tensor | None = None
        self._update: MonitoredUpdate | None = None
        self._view: Any = None
        self._due: bool | None = None

    def see_loss(self, scaled: torch.Tensor) -> None:
        """Take a tensor that is scaled; the last scalar of an iteration is its loss."""
        if scaled.numel() == 1:
            self._loss = scaled.detach().reshape(())

    def begin_step(self, state: LossScaleState, carried: torch.Tensor | None) -> None:
        """Measure the gradients, before an optimizer's step, of which `carried` is the factor; None if unscaled."""
        if self._due is not None:  # a second optimizer of this iteration
            return
        self._due = self.monitor.begin_call()
        if not self._due:
            return
        self._view = self._state_view(state)
        self._update = MonitoredUpdate(self._view, self.monitor.selection(traced=False))
        grads = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        self._norm = _global_norm(list(grads.values()), carried, state.scale)
        self._update.measure(grads, carried)

    def end_iteration(self, state: LossScaleState, found: torch.Tensor) -> None:
        """Give the iteration to the monitor, once the scale is adjusted; `found` is 1 if it was skipped."""
        due, self._due = self._due, None
        if due is None:
            return
        skipped = found > 0.0
        calls = self.monitor.calls
        step = torch.full_like(state.skipped, calls) - state.skipped
        zero = torch.zeros_like(state.scale)
        result = StepResult(
            loss=zero if self._loss is None else self._loss.float().clone(),
            aux=None,
            grad_norm=self._norm if due else zero,
            scale=state.scale.clone(),
            skipped=skipped,
            step=step,
            monitor=self._update.finish(self._view) if due and self._update is not None else None,
        )
        self.monitor.end_call(self._state_view(state), result, due=due)
        self._update = None

    def _state_view(self, state: LossScaleState) -> Any:
        """Return what is read of a state: parameters, scale, and the names that a record is made with."""
        return SimpleNamespace(
            device=state.scale.device,
            scale_state=state,
            parameters=self._parameters,
            replicas=SimpleNamespace(parts_by_name=lambda named: {}),
            plain=lambda tensors: tensors,
            backend=SimpleNamespace(name="torch", to_numpy=to_numpy),
            recipe=self._recipe,
            groups=SimpleNamespace(numbers=dict.fromkeys(self._parameters, 0)),
        )


@torch.no_grad()
def _global_norm(grads: list[torch.Tensor], carried: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return the norm of the unscaled gradients, float32 scalar."""
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float64).to(like.device) for grad in grads]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros_like(like).double()
    return (norm if carried is None else norm / carried.double()).float()

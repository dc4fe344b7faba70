"""`LoopWatch`: gives the iterations of another library's training loop to a `polyamp.Monitor` (S35)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from polyamp.errors import ArgumentError, UnsupportedError, describe_value
from polyamp.monitor.monitor import Monitor
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaleState
from polyamp_torch.integrations.loop_adapter import LoopSettings
from polyamp_torch.own_loop.gradients import optimizer_parameters
from polyamp_torch.own_loop.torch_only.loop_monitor import LoopMonitor


class LoopWatch:
    """Gives the iterations of a loop to a monitor. With a scaler, that scaler tells the monitor; without, the adapter.

    An iteration ends with the step of an optimizer that trains all parameters of the model, or else with the next
    loss. The methods do nothing before `watch`.

    Args:
        monitor: the monitor.
        settings: policy and scaler of the loop.

    Raises:
        ArgumentError: not a monitor.
    """

    def __init__(self, monitor: Monitor, settings: LoopSettings) -> None:
        if not isinstance(monitor, Monitor):
            raise ArgumentError(f"monitor must be a polyamp.Monitor. Received: {describe_value(monitor)}.")
        self.monitor = monitor
        self._settings = settings
        self._model: nn.Module | None = None
        self._loop: LoopMonitor | None = None
        self._state: LossScaleState | None = None
        self._trained: set[int] = set()

    def watch(self, model: nn.Module) -> None:
        """Read the parameters of a model, once they are on their device. A model without trainable ones is ignored.

        Raises:
            UnsupportedError: a second model, or parameters of FSDP1.
        """
        trained = [p for p in model.parameters() if p.requires_grad]
        if not trained or model is self._model:
            return
        if self._model is not None:
            raise UnsupportedError(
                "monitor= reads one model of a loop. Received: a second one with trainable parameters, "
                f"{type(model).__name__}. Put both into one torch.nn.Module, or leave out monitor=."
            )
        scaler = self._settings.scaler
        recipe = Recipe(policy=self._settings.policy, scaler="off" if scaler is None else scaler.loss_scaler)
        self._loop = LoopMonitor(model, self.monitor, recipe, _mean_over_ranks)
        self._model, self._trained = model, set(map(id, trained))
        if scaler is not None:
            scaler.monitor_by(self._loop)
        else:
            one = torch.ones((), device=trained[0].device)
            self._state = LossScaleState(one, *(torch.zeros_like(one, dtype=torch.int32) for _ in range(4)))

    def see_loss(self, loss: torch.Tensor) -> None:
        """Take a loss before its backward pass."""
        if self._loop is not None and self._state is not None:
            self.end_iteration()
            self._loop.see_loss(loss)

    def check_optimizer(self, optimizer: Any) -> None:
        """Raise for an optimizer whose step is several passes.

        Raises:
            UnsupportedError: LBFGS.
        """
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                "monitor= reads steps of one forward and backward pass. Received: LBFGS, which evaluates the loss "
                "several times a step. Leave out monitor=."
            )

    def begin_step(self) -> None:
        """Measure the gradients, before a clip; a second call in an iteration does nothing."""
        if self._loop is not None and self._state is not None:
            self._loop.begin_update(self._state, None)

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """End the iteration if it has no other optimizer."""
        if self._trained <= set(map(id, optimizer_parameters(optimizer))):
            self.end_iteration()

    def end_iteration(self) -> None:
        """Give the iteration to the monitor, if it has stepped."""
        if self._settings.scaler is not None:
            self._settings.scaler.apply_update()
        elif self._loop is not None and self._state is not None:
            self._loop.end_iteration(self._state, torch.zeros_like(self._state.scale))

    def finish(self) -> None:
        """Read what is left, at the end of the training."""
        self.end_iteration()
        self.monitor.flush()

    def release(self) -> None:
        """Read what is left, and let the model go; another may follow."""
        self.finish()
        if self._settings.scaler is not None:
            self._settings.scaler.monitor_by(None)
        self._model = self._loop = self._state = None
        self._trained = set()


def _mean_over_ranks(value: torch.Tensor) -> Any:
    """Return the mean of a scalar over all processes."""
    world = torch.distributed
    if not (world.is_available() and world.is_initialized()) or world.get_world_size() == 1:
        return value
    total = value.clone()
    world.all_reduce(total)
    return total / world.get_world_size()

"""Snapshot of what the forward passes of a step may change: buffers and parameters (S12)."""

from __future__ import annotations

from typing import Any

import torch

from polyamp_torch.step.state import TorchState
from polyamp_torch.step.torch_only import buffers


class PassSnapshot:
    """Buffers and parameters of a state before one pass, or before all passes of a step.

    Args:
        state: the state.
        loss_fn: the loss function of the passes; None for a trial, after which every parameter is restored.

    Attributes:
        buffers: the buffers.
        parameters: the parameters.
    """

    __slots__ = ("buffers", "parameters")

    def __init__(self, state: TorchState, loss_fn: Any = None) -> None:
        self.buffers = buffers.snapshot(state.buffer_owners)
        if loss_fn is None:
            self.parameters = state.writes.before_trial()
        else:
            self.parameters = state.writes.before(loss_fn, training=state.model.training)

    def settle(self, finite: torch.Tensor | None) -> None:
        """Keep the changes if `finite` is true or None; otherwise undo them."""
        buffers.commit_or_rollback(self.buffers, finite)
        self.parameters.settle(finite)

    def undo(self) -> None:
        """Undo the changes."""
        self.settle(torch.zeros((), dtype=torch.bool))

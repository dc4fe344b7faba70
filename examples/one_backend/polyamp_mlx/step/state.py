"""`MLXState`: immutable training state. Every step returns a new one that shares unchanged arrays."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from polyamp.contract.backend import Backend
from polyamp.display import StateDisplayMixin
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp.recipe.scaler import LossScaleState
from polyamp.rules.group_members import GroupMembers
from polyamp.rules.stuck_scale import StuckScaleMonitor
from polyamp_mlx.arrays import copy_array, device_name, evaluate_arrays
from polyamp_mlx.precision.policy_module import replace_arrays

Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MLXState(StateDisplayMixin):
    """Training state: a model, its optimizer and its loss scale.

    Attributes:
        backend: the backend that made it.
        recipe, plan: its recipe, and the recipe's policy resolved for this model's modules.
        groups: parameter groups with their hyperparameters (S27).
        module: the model's structure; its arrays are those of `init`.
        parameters: path -> master weights.
        running: path -> the model's other arrays: running statistics and frozen weights.
        slots: path -> the optimizer's arrays of that parameter.
        counts: path -> number of its updates (S23), int32 scalar.
        scale_state, step, watch: see `polyamp.contract.backend.State`.
        seed: seed of the next step's random numbers (S12).
        draws: number of this state's next random stream; each `value_and_grad` call uses one.
    """

    backend: Backend
    recipe: Recipe
    plan: ResolvedPolicy
    groups: GroupMembers
    module: nn.Module
    parameters: Arrays
    running: Arrays
    slots: dict[str, Arrays]
    counts: Arrays
    scale_state: LossScaleState
    step: mx.array
    seed: int
    watch: StuckScaleMonitor
    draws: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    @property
    def model(self) -> nn.Module:
        """Copy of the model with the current arrays; changes to it do not affect the state."""
        arrays = {path: copy_array(array) for path, array in {**self.parameters, **self.running}.items()}
        return replace_arrays(self.module, evaluate_arrays(arrays))

    @property
    def arrays(self) -> Arrays:
        """All arrays by their names in a checkpoint."""
        named = {f"model/{path}": array for path, array in self.parameters.items()}
        named |= {f"running/{path}": array for path, array in self.running.items()}
        named |= {f"optimizer/{path}/{slot}": a for path, group in self.slots.items() for slot, a in group.items()}
        named |= {f"optimizer/{path}/step": count for path, count in self.counts.items()}
        named |= {f"loss_scale/{name}": value for name, value in self.scale_state._asdict().items()}
        return {**named, "step": self.step}

    def _place(self) -> tuple[str, int]:
        return device_name(), sum(value.size for value in self.parameters.values())

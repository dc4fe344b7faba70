"""`MLXState`: a model under training, as values. Every step returns a new one and shares what did not move."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from polyamp.contract.backend import Backend
from polyamp.recipe.members import Members
from polyamp.recipe.recipe import Recipe
from polyamp.rules.plan import Plan
from polyamp.rules.scale import LossScaleState
from polyamp.rules.stuck import Watch
from polyamp.shown import ShownState
from polyamp_mlx.arrays import computed, device, fresh
from polyamp_mlx.precision.bound import with_arrays

Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MLXState(ShownState):
    """A model, its optimizer and its loss scale.

    Attributes:
        backend: the backend that made it.
        recipe, plan: what it was made with, and the recipe's policy for this model's modules.
        groups: which parameter has which of the optimizer's hyperparameters (S27).
        module: the model's structure; its arrays are those of `init`.
        parameters: path -> master weights.
        running: path -> what else the model keeps: running statistics and frozen weights.
        slots: path -> the optimizer's arrays of that parameter.
        counts: path -> how many updates it took (S23), int32 scalar.
        scale_state, step, watch: see `polyamp.contract.backend.State`.
        seed: where the random numbers of the next step come from (S12).
        draws: which random stream of this state comes next; `value_and_grad` takes one a call.
    """

    backend: Backend
    recipe: Recipe
    plan: Plan
    groups: Members
    module: nn.Module
    parameters: Arrays
    running: Arrays
    slots: dict[str, Arrays]
    counts: Arrays
    scale_state: LossScaleState
    step: mx.array
    seed: int
    watch: Watch
    draws: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    @property
    def model(self) -> nn.Module:
        """The model with its present arrays: a copy, so that nothing done to it reaches the state."""
        arrays = {path: fresh(array) for path, array in {**self.parameters, **self.running}.items()}
        return with_arrays(self.module, computed(arrays))

    @property
    def arrays(self) -> Arrays:
        """Every array by its name in a checkpoint."""
        named = {f"model/{path}": array for path, array in self.parameters.items()}
        named |= {f"running/{path}": array for path, array in self.running.items()}
        named |= {f"optimizer/{path}/{slot}": a for path, group in self.slots.items() for slot, a in group.items()}
        named |= {f"optimizer/{path}/step": count for path, count in self.counts.items()}
        named |= {f"loss_scale/{name}": value for name, value in self.scale_state._asdict().items()}
        return {**named, "step": self.step}

    def _place(self) -> tuple[str, int]:
        return device(), sum(value.size for value in self.parameters.values())

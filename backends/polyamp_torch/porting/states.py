"""Training states over torch on their way to another framework and back: what the arrays of a `TorchState` are, and
models that are trained with `torch.optim` and `torch.amp.GradScaler` by themselves. `polyamp.port` calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from polyamp.porting.states.layout import NativeTraining, OptimizerLayout, StateConverter
from polyamp.porting.states.recipe import of_members
from polyamp.recipe.optimizers import is_spec
from polyamp_torch.porting.optimizers import layout_of, slots_of


class TorchStates:
    """`polyamp.porting.states.layout.StateConverter` over torch."""

    def layout(self, state: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> OptimizerLayout:
        by_id = {id(p): path for path, p in state.parameters.items()}
        if not is_spec(state.recipe.optimizer):
            return layout_of(state.optimizer, by_id)
        spec = state.recipe.optimizer
        slots, counts = slots_of(by_id.values(), spec.slots, counts=spec.tag in ("adam", "adamw", "rmsprop", "adagrad"))
        distinct, numbers = of_members(state.groups)
        moved = [] if state.rates is not None else _moved(state)
        return OptimizerLayout(slots, counts, distinct, numbers, notes=moved)

    def native(self, model: Any, optimizer: Any, scaler: Any) -> NativeTraining:
        from polyamp_torch.porting.training import TorchTraining

        return TorchTraining.of(model, optimizer, scaler)


def _moved(state: Any) -> list[str]:
    """Learning rates that somebody wrote into the groups since `init`."""
    groups = state.optimizer.param_groups
    members = state.groups.distinct
    return [
        f"the learning rate of parameter group {index} of the torch state is {float(group['lr']):g}, and "
        f"{member.learning_rate:g} in its recipe: what moved it is not in the recipe, and does not move along"
        for index, (group, member) in enumerate(zip(groups, members, strict=False))
        if not callable(member.learning_rate) and float(group["lr"]) != float(member.learning_rate)
    ]


STATES: Final[StateConverter] = TorchStates()

"""`TorchStateConverter`, which moves torch training states to and from other frameworks.

It describes the arrays of a `TorchState`, and models trained with `torch.optim` and `torch.amp.GradScaler` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from polyamp.porting.states.optimizer_layout import NativeTraining, OptimizerLayout, StateConverter
from polyamp.porting.states.recipe_comparison import member_settings
from polyamp.recipe.optimizers import is_spec
from polyamp_torch.porting.optimizer_layout import checkpoint_slots, read_optimizer_layout
from polyamp_torch.step.torch_only.spec_formulas import keeps_counts


class TorchStateConverter:
    """`polyamp.porting.states.optimizer_layout.StateConverter` for torch."""

    def layout(self, state: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> OptimizerLayout:
        by_id = {id(p): path for path, p in state.parameters.items()}
        if not is_spec(state.recipe.optimizer):
            return read_optimizer_layout(state.optimizer, by_id)
        spec = state.recipe.optimizer
        slots, counts = checkpoint_slots(by_id.values(), spec.slots, counts=keeps_counts(spec))
        distinct, numbers = member_settings(state.groups)
        moved = [] if state.rates is not None else _changed_learning_rates(state)
        return OptimizerLayout(slots, counts, distinct, numbers, notes=moved)

    def native(self, model: Any, optimizer: Any, scaler: Any) -> NativeTraining:
        from polyamp_torch.porting.native_training import TorchTraining

        return TorchTraining(model, optimizer, scaler)


def _changed_learning_rates(state: Any) -> list[str]:
    """Return learning rates that were written into the parameter groups after `init`."""
    groups = state.optimizer.param_groups
    members = state.groups.distinct
    return [
        f"the learning rate of parameter group {index} of the torch state is {float(group['lr']):g}, and "
        f"{member.learning_rate:g} in its recipe: what moved it is not in the recipe, and does not move along"
        for index, (group, member) in enumerate(zip(groups, members, strict=False))
        if not callable(member.learning_rate) and float(group["lr"]) != float(member.learning_rate)
    ]


STATE_CONVERTER: Final[StateConverter] = TorchStateConverter()

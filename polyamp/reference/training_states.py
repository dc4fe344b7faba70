"""Training-state converter of the reference backend: the shortest example of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polyamp.errors import UnsupportedError
from polyamp.porting.states.optimizer_layout import NativeTraining, OptimizerLayout, UpdateCount
from polyamp.porting.states.recipe_comparison import member_settings

if TYPE_CHECKING:
    from polyamp.reference.arrays import Array


class ReferenceStateConverter:
    """`polyamp.porting.states.optimizer_layout.StateConverter` over NumPy."""

    def layout(self, state: Any, arrays: Mapping[str, Array]) -> OptimizerLayout:
        """Return the layout: slots and counts are stored under the parameter's own name."""
        names = list(state.model.parameters)
        slots = {slot: {name: f"optimizer/{name}/{slot}" for name in names} for slot in state.recipe.optimizer.slots}
        counts = {name: UpdateCount(f"optimizer/{name}/step") for name in names}
        return OptimizerLayout(slots, counts, *member_settings(state.groups))

    def native(self, model: Any, optimizer: Any, scaler: Any) -> NativeTraining:
        """Raise: the reference has no native optimizers."""
        raise UnsupportedError("NumPy has no optimizers and loss scalers of its own.")

"""The reference backend's half of moving training states: the shortest example of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polyamp.errors import UnsupportedError
from polyamp.porting.states.layout import Count, NativeTraining, OptimizerLayout
from polyamp.porting.states.recipe import of_members

if TYPE_CHECKING:
    from polyamp.reference.arrays import Array


class ReferenceStates:
    """`polyamp.porting.states.layout.StateConverter` over NumPy."""

    def layout(self, state: Any, arrays: Mapping[str, Array]) -> OptimizerLayout:
        """Slots and counts lie under the parameter's own name."""
        names = list(state.model.parameters)
        slots = {slot: {name: f"optimizer/{name}/{slot}" for name in names} for slot in state.recipe.optimizer.slots}
        counts = {name: Count(f"optimizer/{name}/step") for name in names}
        return OptimizerLayout(slots, counts, *of_members(state.groups))

    def native(self, model: Any, optimizer: Any, scaler: Any) -> NativeTraining:
        """There is nothing of the kind."""
        raise UnsupportedError("NumPy has no optimizers and loss scalers of its own.")

"""Transfer of Keras training states: the layout of a `TensorFlowState`, and models with Keras's own optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from polyamp.porting.states.optimizer_layout import NativeTraining, OptimizerLayout, StateConverter
from polyamp.porting.states.recipe_comparison import member_settings
from polyamp_keras.own_loop.spec_optimizer import SpecOptimizer
from polyamp_keras.porting.optimizer_layout import read_optimizer_layout
from polyamp_tensorflow.arrays import Array, to_numpy


class TensorFlowStateConverter:
    """`polyamp.porting.states.optimizer_layout.StateConverter` for TensorFlow."""

    def layout(self, state: Any, arrays: Mapping[str, Array]) -> OptimizerLayout:
        found = read_optimizer_layout(state.optimizer, list(state.variables.parameters))
        if not isinstance(state.optimizer, SpecOptimizer):
            return found
        distinct, numbers = member_settings(state.groups)
        return OptimizerLayout(
            found.slots,
            found.counts,
            distinct,
            numbers,
            found.positions,
            notes=_changed_learning_rates(state.optimizer),
        )

    def native(self, model: Any, optimizer: Any, scaler: Any) -> NativeTraining:
        from polyamp_keras.porting.native_training import KerasTraining

        return KerasTraining.of(model, optimizer, scaler)


def _changed_learning_rates(optimizer: Any) -> list[str]:
    """Return a note if the learning rate was assigned since `init`."""
    given = optimizer.spec.learning_rate
    now = float(to_numpy(optimizer.learning_rate))  # works for replicas too, whose variables are no numbers
    if callable(given) or abs(now - given) <= 1e-6 * given:
        return []
    return [
        f"the learning rate of the tensorflow state is {now:g}, and {given:g} in its "
        "recipe: what moved it is not in the recipe, and does not move along"
    ]


STATE_CONVERTER: Final[StateConverter] = TensorFlowStateConverter()

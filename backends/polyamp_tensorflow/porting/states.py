"""Training states over Keras on their way to another framework and back: what the variables of a `TensorFlowState` are,
and models that are compiled with Keras's own optimizers. `polyamp.port` calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from polyamp.porting.states.layout import NativeTraining, OptimizerLayout, StateConverter
from polyamp.porting.states.recipe import of_members
from polyamp_tensorflow.arrays import Array, to_numpy
from polyamp_tensorflow.porting.optimizers import layout_of
from polyamp_tensorflow.step.optimizers import SpecOptimizer


class TensorFlowStates:
    """`polyamp.porting.states.layout.StateConverter` over TensorFlow."""

    def layout(self, state: Any, arrays: Mapping[str, Array]) -> OptimizerLayout:
        found = layout_of(state.optimizer, list(state.variables.parameters))
        if not isinstance(state.optimizer, SpecOptimizer):
            return found
        distinct, numbers = of_members(state.groups)
        return OptimizerLayout(
            found.slots, found.counts, distinct, numbers, found.positions, notes=_moved(state.optimizer)
        )

    def native(self, model: Any, optimizer: Any, scaler: Any) -> NativeTraining:
        from polyamp_tensorflow.porting.training import KerasTraining

        return KerasTraining.of(model, optimizer, scaler)


def _moved(optimizer: Any) -> list[str]:
    """A learning rate that somebody assigned since `init`."""
    given = optimizer.spec.learning_rate
    now = float(to_numpy(optimizer.learning_rate))  # of replicas too, whose variables are no numbers
    if callable(given) or abs(now - given) <= 1e-6 * given:
        return []
    return [
        f"the learning rate of the tensorflow state is {now:g}, and {given:g} in its "
        "recipe: what moved it is not in the recipe, and does not move along"
    ]


STATES: Final[StateConverter] = TensorFlowStates()

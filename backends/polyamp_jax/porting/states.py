"""Training states over JAX on their way to another framework and back: what the arrays of a `JaxState` are, and models
that are trained with optax by itself. `polyamp.port` calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from polyamp.porting.states.layout import NativeTraining, OptimizerLayout, StateConverter
from polyamp.porting.states.recipe import of_members
from polyamp.recipe.optimizers import is_spec
from polyamp_jax.arrays import named_leaves
from polyamp_jax.porting.optimizer_states import found_in


class JaxStates:
    """`polyamp.porting.states.layout.StateConverter` over JAX."""

    def layout(self, state: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> OptimizerLayout:
        names = list(named_leaves(state.params))
        if not is_spec(state.recipe.optimizer):
            from polyamp_jax.porting.training import optax_layout

            return optax_layout(state.opt_state, state.recipe.optimizer, names)
        found = found_in(state.opt_state, names)
        distinct, numbers = of_members(state.groups)
        return OptimizerLayout(found.slots, found.counts, distinct, numbers, found.positions)

    def native(self, model: Any, optimizer: Any, scaler: Any) -> NativeTraining:
        from polyamp_jax.porting.training import JaxTraining

        return JaxTraining.of(model, optimizer, scaler)


STATES: Final[StateConverter] = JaxStates()

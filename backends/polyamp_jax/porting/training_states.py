"""Transfer of JAX training states: the layout of a `JaxState`, and models trained with plain optax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from polyamp.porting.states.optimizer_layout import NativeTraining, OptimizerLayout, StateConverter
from polyamp.porting.states.recipe_comparison import member_settings
from polyamp.recipe.optimizers import is_spec
from polyamp_jax.arrays import named_leaves, to_numpy
from polyamp_jax.models.libraries import adapt
from polyamp_jax.porting.optimizer_layout import inspect_optax_state


class JaxStateConverter:
    """`polyamp.porting.states.optimizer_layout.StateConverter` for JAX."""

    def layout(self, state: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> OptimizerLayout:
        names = list(named_leaves(state.params))
        if not is_spec(state.recipe.optimizer):
            from polyamp_jax.porting.native_training import read_optimizer_layout

            return read_optimizer_layout(state.opt_state, state.recipe.optimizer, state.params)
        found = inspect_optax_state(state.opt_state, names)
        distinct, numbers = member_settings(state.groups)
        return OptimizerLayout(found.slots, found.counts, distinct, numbers, found.positions)

    def native(self, model: Any, optimizer: Any, scaler: Any) -> NativeTraining:
        from polyamp_jax.porting.native_training import JaxTraining

        return JaxTraining.of(model, optimizer, scaler)

    def running_arrays(self, model: Any) -> dict[str, np.ndarray[Any, Any]]:
        statistics = adapt(model).running.statistics
        return {name: to_numpy(leaf) for name, leaf in named_leaves({"running": statistics}).items()}


STATE_CONVERTER: Final[StateConverter] = JaxStateConverter()

"""`TensorFlowBackend`: the backend protocol of `polyamp.contract.backend` for TensorFlow and Keras."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import tensorflow as tf

from polyamp.backend_parts import BackendParts, lazy_part
from polyamp.contract.backend import Backend, BackendInfo, ValueAndGrad
from polyamp.contract.harness import Harness
from polyamp.errors import PolyampError
from polyamp.porting.layouts.converter import Converter
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaler
from polyamp.results import Gradients, LossFunction, StepFunction, StepResult
from polyamp.rules.step_checks import check_options
from polyamp.rules.update_decision import Skip
from polyamp_keras import arrays as keras_arrays
from polyamp_keras.engines.tensorflow import XP
from polyamp_keras.models.layers import check_is_model
from polyamp_keras.own_loop.optimizer_checks import check_recipe_optimizer
from polyamp_keras.precision import regularization_losses
from polyamp_keras.precision.apply_policy import dtype_policy
from polyamp_tensorflow import arrays as conversions
from polyamp_tensorflow.arrays import Array
from polyamp_tensorflow.distributed.replicas import find_replicas
from polyamp_tensorflow.losses import TensorFlowLosses
from polyamp_tensorflow.own_loop.native_scaler import LossScaleOptimizer, native_scaler
from polyamp_tensorflow.precision import autocast as policies
from polyamp_tensorflow.precision.policy_module import module_parameters
from polyamp_tensorflow.step import averages, error_hints, optimizer_metadata, step
from polyamp_tensorflow.step import grad_stats as scaling
from polyamp_tensorflow.step.accumulation import accumulate_gradients
from polyamp_tensorflow.step.refresh import refresh_state
from polyamp_tensorflow.step.state import TensorFlowState
from polyamp_tensorflow.step.tensorflow_only.graph_function import GraphFunction
from polyamp_tensorflow.step.update import update_states

_STEP_OPTIONS: Final = ("compile", "jit_compile", "weight")


class TensorFlowBackend(BackendParts):
    """`Backend` over TensorFlow and Keras."""

    name = "tensorflow"
    monitors_steps = True
    changes_op_rules = True
    has_float8_products = True
    xp = XP
    losses = TensorFlowLosses()
    scalar = staticmethod(conversions.scalar)
    to_numpy = staticmethod(conversions.to_numpy)
    cast = staticmethod(keras_arrays.cast)
    native_policy = staticmethod(dtype_policy)
    autocast = staticmethod(policies.autocast)
    scale_loss = staticmethod(scaling.scale_loss)
    unscale = staticmethod(scaling.unscale)
    regularization = staticmethod(regularization_losses.regularization)
    parameters = staticmethod(module_parameters)
    refresh = staticmethod(refresh_state)
    averaged = staticmethod(averages.averaged)
    averaged_model = staticmethod(averages.averaged_model)
    porting: Converter = lazy_part("porting.converter", "CONVERTER", package="polyamp_keras")

    def info(self) -> BackendInfo:
        devices = [conversions.device_name(device.name) for device in tf.config.list_physical_devices()]
        return BackendInfo("tensorflow", tf.__version__, tuple(sorted(devices, key=lambda name: "CPU" in name)))

    def is_concrete(self, array: Any) -> bool:
        return hasattr(array, "numpy")

    def native_scaler(self, scaler: LossScaler, **options: Any) -> LossScaleOptimizer:
        return native_scaler(scaler, **options)

    def init(self, model: Any, recipe: Recipe, **options: Any) -> TensorFlowState:
        check_options(options, (), function="init", backend=self.name)
        policies.require_tensorflow()
        find_replicas()  # raises if their strategy is not supported
        check_is_model(model)
        check_recipe_optimizer(recipe.optimizer, recipe.clip_norm)
        return TensorFlowState(model, recipe, self)

    def train_step(self, loss_fn: LossFunction, recipe: Recipe, **options: Any) -> StepFunction:
        check_options(options, (*_STEP_OPTIONS, "monitor"), function="train_step", backend=self.name)
        weight, monitor = options.pop("weight", None), options.pop("monitor", None)
        body = GraphFunction(
            lambda states, batch: step.train_step(states, loss_fn, batch, weight, monitor),
            **{"jit_compile": None, **options},
        )
        accumulates = recipe.accumulate_steps > 1

        def run(state: Any, batch: Any) -> tuple[Any, StepResult]:
            batch = conversions.to_tensors(batch, recipe.policy.param)
            step.build_models([state], loss_fn, batch[0] if accumulates and isinstance(batch, list) else batch)
            state.check_unchanged()
            return state, body([state], batch)

        return run

    def value_and_grad(self, loss_fn: LossFunction, **options: Any) -> ValueAndGrad:
        check_options(options, _STEP_OPTIONS, function="value_and_grad", backend=self.name)
        weight = options.pop("weight", None)
        body = GraphFunction(
            lambda states, batch: accumulate_gradients(states, loss_fn, batch, 1, weight),
            **{"jit_compile": None, **options},
        )

        def run(states: Sequence[Any], batch: Any) -> tuple[Any, list[Gradients]]:
            batch = conversions.to_tensors(batch, states[0].recipe.policy.param)
            step.build_models(states, loss_fn, batch)
            for state in states:
                state.check_unchanged()
            loss, aux, found = body(states, batch)
            return (loss if aux is None else (loss, aux)), list(found)

        return run

    def apply_gradients(
        self, states: Sequence[Any], grads: Sequence[Gradients], skip: Skip
    ) -> tuple[list[Any], list[StepResult]]:
        for state in states:
            state.check_unchanged()
        results = _UPDATE_FUNCTIONS[skip](states, [conversions.to_tensors(item) for item in grads])
        return list(states), list(results)

    def named_gradients(self, gradients: Gradients) -> list[tuple[str, Any]]:
        return list(gradients.values.items())

    def export_state(self, state: Any) -> dict[str, Array]:
        exported: dict[str, Array] = state.export()
        return exported

    def import_state(self, state: Any, arrays: Mapping[str, Array]) -> TensorFlowState:
        restored: TensorFlowState = state
        restored.restore(arrays)
        return restored

    def optimizer_settings(self, state: Any) -> dict[str, Any]:
        return dict(state.optimizer_settings)

    def setting_of(self, state: Any, name: str) -> str | None:
        return optimizer_metadata.optimizer_setting(state.optimizer, name)

    def explain_error(self, error: Exception, states: Sequence[Any], batch: Any) -> PolyampError | None:
        return error_hints.explain_error(error, states)

    def testing(self) -> Harness:
        from polyamp_tensorflow.harness import TensorFlowHarness

        return TensorFlowHarness()


_UPDATE_FUNCTIONS: Final[dict[str, GraphFunction]] = {
    "all": GraphFunction(lambda states, grads: update_states(states, grads, "all"), split=False),
    "each": GraphFunction(lambda states, grads: update_states(states, grads, "each"), split=False),
}

BACKEND: Final[Backend] = TensorFlowBackend()
"""The backend itself, which `polyamp` finds by its entry point."""

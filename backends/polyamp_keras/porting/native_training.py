"""Training states of models compiled with Keras's own optimizers. A `LossScaleOptimizer` contains the loss scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import keras
import numpy as np

from polyamp.errors import ArgumentError, describe_value
from polyamp.porting.states.optimizer_layout import OptimizerLayout
from polyamp.recipe.scaler import PRESETS, LossScaleState
from polyamp_keras.engine import ENGINE
from polyamp_keras.engines.differentiation import HostArray
from polyamp_keras.models.variables import model_variables
from polyamp_keras.own_loop.scaled_optimizer import ScaledOptimizer
from polyamp_keras.own_loop.spec_optimizer import optimizer_variables
from polyamp_keras.porting.fill import assign
from polyamp_keras.porting.optimizer_layout import read_optimizer_layout

_CALL: Final = "training(model, optimizer, scaler)"


class KerasTraining:
    """`polyamp.porting.states.optimizer_layout.NativeTraining` for Keras. All variables belong to the user.

    Attributes:
        model: a built model.
        optimizer: its optimizer; a `LossScaleOptimizer` also contains the loss scale.
        loss_scaler: None, because in Keras the loss scale belongs to the optimizer.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loss_scaler = None
        self._scaling = optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else None
        self._variables = model_variables(model)
        inner = optimizer if self._scaling is None else self._scaling.inner_optimizer
        if not optimizer.built:
            optimizer.build(list(model.trainable_variables))
        self._inner = inner

    @classmethod
    def of(cls, model: Any, optimizer: Any, scaler: Any) -> KerasTraining:
        """Create a training state; see `StateConverter.native`."""
        if scaler is not None:
            raise ArgumentError(
                f"{_CALL}: in Keras the loss scale is in the optimizer, a keras.optimizers.LossScaleOptimizer around "
                f"the other one. Received: scaler={describe_value(scaler)}. Write training(model), or training(model, "
                "optimizer)."
            )
        found = getattr(model, "optimizer", None) if optimizer is None else optimizer
        if not isinstance(found, keras.optimizers.Optimizer):
            raise ArgumentError(
                f"{_CALL}: a compiled Keras model, or a model and its keras.optimizers.Optimizer. Received: optimizer="
                f"{describe_value(found)}."
            )
        return cls(model, found)

    @property
    def layout(self) -> OptimizerLayout:
        return read_optimizer_layout(self._inner, list(self._variables.parameters))

    @property
    def scaler(self) -> Mapping[str, Any]:
        if self._scaling is None:
            return {}
        if isinstance(self._scaling, ScaledOptimizer):
            return self._scaling.scaler.to_dict()
        constants = {"growth_factor": 2.0, "backoff_factor": 0.5}
        growth = {"growth_interval": int(self._scaling.dynamic_growth_steps)}
        return {**PRESETS["keras"], "min_scale": 2.0**-126, **constants, **growth}

    def arrays(self) -> dict[str, HostArray]:
        return {name: np.array(ENGINE.host_values(variable)) for name, variable in self._everything().items()}

    def replaced(self, arrays: Mapping[str, HostArray]) -> KerasTraining:
        least = {}
        if self._scaling is not None and not isinstance(self._scaling, ScaledOptimizer):
            # Keras compares the counter with the interval by ==, so a larger counter would never grow the scale again
            most = int(self._scaling.dynamic_growth_steps) - 1
            least = {"loss_scale/good_steps": np.minimum(arrays["loss_scale/good_steps"], most)}
        for name, variable in self._everything().items():
            assign(variable, np.asarray(least.get(name, arrays[name])))
        return self

    def _everything(self) -> dict[str, Any]:
        parameters, frozen, running, _, _ = self._variables
        groups = {
            "model": {**parameters, **frozen},
            "running": running,
            "optimizer": optimizer_variables(self._inner, list(parameters)),
            "loss_scale": self._scale_variables(),
        }
        return {f"{group}/{name}": variable for group, own in groups.items() for name, variable in own.items()}

    def _scale_variables(self) -> dict[str, Any]:
        if self._scaling is None:
            return {}
        if isinstance(self._scaling, ScaledOptimizer):
            held: LossScaleState = self._scaling.scale_variables
            return held._asdict()
        return {"scale": self._scaling.dynamic_scale, "good_steps": self._scaling.step_counter}

"""The guard of `fit` in a model's file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import keras

from polyamp_keras.arrays import read_value
from polyamp_keras.models.keras_serialization import ModelSetting
from polyamp_keras.models.variables import seed_variables
from polyamp_keras.own_loop.scaled_optimizer import ScaledOptimizer


@keras.saving.register_keras_serializable(package="polyamp_tensorflow")
class SavedGuard(ModelSetting):
    """Setting in a model's `.keras` file: the guard of the model, and its random seeds (S12)."""

    needs_compile: ClassVar[bool] = True
    guard_model: ClassVar[Callable[[Any, str | None], None]]
    """`(model, float32_matmul)`: the guard of this Keras backend."""

    def __init__(self, model: Any, precision: str | None, seeds: dict[str, Any] | None = None) -> None:
        self._model = model
        self._precision = precision
        self._seeds = seeds

    def get_config(self) -> dict[str, Any]:
        """Return the setting as plain values."""
        seeds = self._seeds
        if self._model is not None:
            seeds = {
                name: keras.ops.convert_to_numpy(read_value(variable)).tolist()
                for name, variable in seed_variables(self._model).items()
            }
        return {"float32_matmul": self._precision, "seeds": seeds}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SavedGuard:
        """Create the saved setting, to be applied by `install`."""
        return cls(None, config["float32_matmul"], config["seeds"])

    def install(self, model: Any) -> None:
        """Guard a model that Keras has compiled, unless its class overrides `compile`."""
        if isinstance(getattr(model, "optimizer", None), ScaledOptimizer):
            SavedGuard.guard_model(model, self._precision)
            seeds = self._seeds or {}
            for name, variable in seed_variables(model).items():
                if name in seeds:
                    variable.assign(keras.ops.array(seeds[name], variable.dtype))

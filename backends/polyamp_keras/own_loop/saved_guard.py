"""The guard of `fit` in a model's file, and `FitBackend`, by which it is installed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple

import keras

from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_keras.arrays import read_value
from polyamp_keras.models.keras_serialization import ModelSetting
from polyamp_keras.models.variables import seed_variables
from polyamp_keras.own_loop.scaled_optimizer import ScaledOptimizer


class FitBackend(NamedTuple):
    """What `compile` and `guard` need of the backend that Keras runs on.

    Attributes:
        optimizer: its `LossScaleOptimizer`.
        choose_jit: `(model, plan, jit_compile, run_eagerly)` -> the `jit_compile` of `model.compile`, for that of
            `compile`; raises for what `fit` does not support.
        install_guard: `(model, float32_matmul)`: restores running statistics, and detects a stuck scale.
        scope: `(model)` -> context manager in which the optimizer is made.
        check_optimizer: raises for optimizers that do not train there; None for no check.
    """

    optimizer: type[ScaledOptimizer]
    choose_jit: Callable[[Any, ResolvedPolicy, bool | str | None, bool], bool | str]
    install_guard: Callable[[Any, str | None], None]
    scope: Callable[[Any], AbstractContextManager[Any]] = contextlib.nullcontext
    check_optimizer: Callable[[Any], None] | None = None


@keras.saving.register_keras_serializable(package="polyamp_tensorflow")
class SavedGuard(ModelSetting):
    """Setting in a model's `.keras` file: the guard of the model, and its random seeds (S12)."""

    needs_compile: ClassVar[bool] = True
    backend: ClassVar[FitBackend]
    """What `fit` needs of this Keras backend."""

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
            SavedGuard.backend.install_guard(model, self._precision)
            seeds = self._seeds or {}
            for name, variable in seed_variables(model).items():
                if name in seeds:
                    variable.assign(keras.ops.array(seeds[name], variable.dtype))

"""Keras models on every Keras backend: a policy on their layers, `fit`, and loops of one's own.

Where Keras runs on TensorFlow, the names are those of `polyamp_tensorflow`, the same objects. Where it runs on torch or
JAX, TensorFlow is not imported.

- `compile` configures a model by a recipe, for `fit`;
- `guard` does what `compile` does, for a model with a `LossScaleOptimizer` that Keras compiled;
- `apply_policy` applies a policy to a built model, permanently or for a block;
- `dtype_policy` is a policy as Keras's own;
- `LossScaleOptimizer` wraps any Keras optimizer, and `SpecOptimizer` is one with PyTorch's formulas;
- `LossScaleLogger` adds the loss scale to the logs of `fit`;
- `MonitorCallback` gives the steps of `fit` to a `polyamp.Monitor`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import keras

from polyamp_keras.backend_choice import backend_name

__all__ = [
    "AppliedPolicy",
    "LossScaleLogger",
    "LossScaleOptimizer",
    "MonitorCallback",
    "SpecOptimizer",
    "apply_policy",
    "compile",
    "dtype_policy",
    "guard",
]

if TYPE_CHECKING:
    from polyamp_keras.own_loop.fit import compile, guard  # noqa: A004  # Keras's word for it
    from polyamp_keras.own_loop.fit_monitor import MonitorCallback
    from polyamp_keras.own_loop.loss_scale_logger import LossScaleLogger
    from polyamp_keras.own_loop.native_scaler import KerasLossScaleOptimizer as LossScaleOptimizer
    from polyamp_keras.own_loop.spec_optimizer import SpecOptimizer
    from polyamp_keras.precision.apply_policy import AppliedPolicy, apply_policy, dtype_policy

_HOMES: Final = {
    "AppliedPolicy": "precision.apply_policy",
    "LossScaleLogger": "own_loop.loss_scale_logger",
    "LossScaleOptimizer": "own_loop.native_scaler",
    "MonitorCallback": "own_loop.fit_monitor",
    "SpecOptimizer": "own_loop.spec_optimizer",
    "apply_policy": "precision.apply_policy",
    "compile": "own_loop.fit",
    "dtype_policy": "precision.apply_policy",
    "guard": "own_loop.fit",
}
"""Public name -> its module here. On TensorFlow the names are those of `polyamp_tensorflow`."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'polyamp_keras' has no attribute {name!r}.")
    if keras.config.backend() == "tensorflow":
        value = getattr(import_module("polyamp_tensorflow"), name)
    else:
        module = import_module(f"{__name__}.{_HOMES[name]}")
        value = getattr(module, "KerasLossScaleOptimizer" if name == "LossScaleOptimizer" else name)
    globals()[name] = value
    return value


# Keras finds the classes of a file once they are registered, which importing their modules does.
if backend_name() != "tensorflow":
    import_module(f"{__name__}.own_loop.fit")
    import_module(f"{__name__}.own_loop.train_step_guard")
elif "polyamp_tensorflow" not in sys.modules:
    import_module("polyamp_tensorflow")

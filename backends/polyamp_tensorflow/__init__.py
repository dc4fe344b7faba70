"""TensorFlow and Keras backend of polyamp. `polyamp` loads it automatically for a Keras model or a tensor.

The training step runs in one `tf.function` per state (see `step`). Keras's own loss scaling, clipping and accumulation
stay off. `loss_fn` is traced without AutoGraph, so that its exceptions reach the user unchanged: use `tf.where` or
`tf.cond` for what depends on a tensor's value.

For `fit` and custom training loops:

- `compile` configures a model by a recipe;
- `apply_policy` applies a policy to a built model, permanently or for a block;
- `LossScaleOptimizer` wraps any Keras optimizer;
- `MonitorCallback` gives the steps of `fit` to a `polyamp.Monitor`;
- `SpecOptimizer` is a Keras optimizer with PyTorch's formulas.

On TensorFlow `compile`, `apply_policy`, `LossScaleOptimizer` and what else has the same name in `polyamp_keras` is the
same object there: import either.
"""

from __future__ import annotations

from importlib import import_module

from polyamp.backend_lookup import check_framework

check_framework(__name__, "tensorflow", "tensorflow", "keras")

from polyamp_keras.own_loop.fit import compile, guard  # noqa: A004  # Keras's word for it
from polyamp_keras.own_loop.fit_monitor import MonitorCallback
from polyamp_keras.own_loop.loss_scale_logger import LossScaleLogger  # Keras's word for it
from polyamp_keras.own_loop.spec_optimizer import SpecOptimizer
from polyamp_keras.precision.apply_policy import AppliedPolicy, apply_policy, dtype_policy
from polyamp_tensorflow.backend import BACKEND, TensorFlowBackend
from polyamp_tensorflow.own_loop.native_scaler import LossScaleOptimizer
from polyamp_tensorflow.step.state import TensorFlowState

import_module(f"{__name__}.own_loop.tensorflow_only.train_step_guard")  # `fit` is then guarded as on TensorFlow

__all__ = [
    "BACKEND",
    "AppliedPolicy",
    "LossScaleLogger",
    "LossScaleOptimizer",
    "MonitorCallback",
    "SpecOptimizer",
    "TensorFlowBackend",
    "TensorFlowState",
    "apply_policy",
    "compile",
    "dtype_policy",
    "guard",
]


def __dir__() -> list[str]:
    return __all__

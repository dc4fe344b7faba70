"""polyamp's TensorFlow and Keras backend; `polyamp` loads it by itself when it is given a Keras model or a tensor.

What the step does, it does in one `tf.function` per state (see `step`): Keras's own loss scaling, clipping and
accumulation stay off. `loss_fn` is traced without AutoGraph, so that its exceptions arrive as they are: what depends
on a tensor's value is written with `tf.where` or `tf.cond`.

For people who use `fit` or keep their own loop: `compile` sets a model up by a recipe; `apply_policy` puts a built
model under a policy, for a while or for good; `LossScaleOptimizer` wraps any Keras optimizer; `SpecOptimizer` is one
with PyTorch's formulas.
"""

from __future__ import annotations

from polyamp_tensorflow.backend import BACKEND, TensorFlowBackend
from polyamp_tensorflow.own_loop.fit import LossScaleLogger, compile, guard  # noqa: A004  # Keras's word for it
from polyamp_tensorflow.own_loop.loss_scale_optimizer import LossScaleOptimizer
from polyamp_tensorflow.precision.autocast import AppliedPolicy, apply_policy, dtype_policy
from polyamp_tensorflow.step.optimizers import SpecOptimizer
from polyamp_tensorflow.step.state import TensorFlowState

__all__ = [
    "BACKEND",
    "AppliedPolicy",
    "LossScaleLogger",
    "LossScaleOptimizer",
    "SpecOptimizer",
    "TensorFlowBackend",
    "TensorFlowState",
    "apply_policy",
    "compile",
    "dtype_policy",
    "guard",
]

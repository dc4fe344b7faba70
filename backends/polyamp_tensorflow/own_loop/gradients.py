"""Gradients of one `apply`: unscaling, norm and finite flag (S7 to S11)."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from polyamp.rules.clip import gradient_clip
from polyamp.rules.update_decision import GradStats
from polyamp_keras.own_loop.gradients import divide_by_scale
from polyamp_keras.own_loop.scaler_state import ApplyCall
from polyamp_tensorflow.step.grad_stats import global_norm_and_finite


def unscale_gradients(call: ApplyCall, gradients: list[Any]) -> tuple[list[Any], GradStats]:
    """Return the unscaled gradients and their statistics.

    The norm is not computed if neither the flag nor a clip nor a monitor needs it.
    """
    gradients, weight = divide_by_scale(call, gradients)
    optimizer = call.optimizer
    if not optimizer.scaler.checks and gradient_clip(optimizer.clip).factor is None and optimizer.figures is None:
        return gradients, GradStats(tf.constant(1.0), tf.constant(True), weight)
    return gradients, GradStats(*global_norm_and_finite(gradients), weight)

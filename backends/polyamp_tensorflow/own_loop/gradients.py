"""Gradients of one `apply`: sums over the micro-batches, unscaling, norm and finite flag (S7 to S11)."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from polyamp.rules.update_decision import GradStats
from polyamp_tensorflow.arrays import native_variable
from polyamp_tensorflow.own_loop.tensorflow_only.scaler_state import ApplyCall, variable_indices, weight_sum
from polyamp_tensorflow.step.grad_stats import global_norm_and_finite
from polyamp_tensorflow.step.optimizers import SpecOptimizer


def add_to_sums(call: ApplyCall, gradients: list[Any]) -> list[Any]:
    """Return the sums of the accumulation so far with these gradients added; without accumulation, the gradients."""
    if not call.state.sums:
        return gradients
    sums = [native_variable(call.state.sums[index]) for index in variable_indices(call, call.variables)]
    if call.share is not None:
        sums = [total * tf.cast(call.share.earlier, total.dtype) for total in sums]
    return [total + gradient for total, gradient in zip(sums, gradients, strict=True)]


def unscale_gradients(call: ApplyCall, gradients: list[Any]) -> tuple[list[Any], GradStats]:
    """Return the unscaled gradients and their statistics.

    The norm is not computed if neither the flag nor a clip nor a monitor needs it.
    """
    scaler, state, weight = call.optimizer.scaler, call.state, None
    count = weight_sum(call)
    if call.share is not None:
        weight = count
        count = tf.where(count > 0.0, count, 1.0)
    if scaler.scales or state.sums:
        divisor = native_variable(state.scale.scale) * count if scaler.scales else tf.convert_to_tensor(count)
        gradients = [gradient / tf.cast(divisor, gradient.dtype) for gradient in gradients]
    if isinstance(call.optimizer.inner_optimizer, SpecOptimizer):
        gradients = call.optimizer.inner_optimizer.zero_waiting(call.variables, gradients)
    if not scaler.checks and call.optimizer.clip_norm is None and call.optimizer.figures is None:
        return gradients, GradStats(tf.constant(1.0), tf.constant(True), weight)
    return gradients, GradStats(*global_norm_and_finite(gradients), weight)

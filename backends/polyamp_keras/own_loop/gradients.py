"""Gradients of one `apply`: sums over the micro-batches, and unscaling (S7, S8)."""

from __future__ import annotations

from typing import Any

import keras

from polyamp_keras.arrays import dtype_name, native_variable
from polyamp_keras.engine import ENGINE
from polyamp_keras.own_loop.scaler_state import ApplyCall, variable_indices, weight_sum
from polyamp_keras.own_loop.spec_optimizer import SpecOptimizer


def add_to_sums(call: ApplyCall, gradients: list[Any]) -> list[Any]:
    """Return the sums of the accumulation so far with these gradients added; without accumulation, the gradients."""
    if not call.state.sums:
        return gradients
    sums = [native_variable(call.state.sums[index]) for index in variable_indices(call, call.variables)]
    if call.share is not None:
        sums = [total * keras.ops.cast(call.share.earlier, dtype_name(total)) for total in sums]
    return [total + gradient for total, gradient in zip(sums, gradients, strict=True)]


def divide_by_scale(call: ApplyCall, gradients: list[Any]) -> tuple[list[Any], Any]:
    """Return the unscaled gradients of an update, and the sum of its weights; None if every micro-batch weighs 1."""
    scaler, state, weight = call.optimizer.scaler, call.state, None
    count = weight_sum(call)
    if call.share is not None:
        weight = count
        count = keras.ops.where(count > 0.0, count, 1.0)
    if scaler.scales or state.sums:
        divisor = native_variable(state.scale.scale) * count if scaler.scales else keras.ops.convert_to_tensor(count)
        gradients = ENGINE.divide(gradients, divisor)
    if isinstance(call.optimizer.inner_optimizer, SpecOptimizer):
        gradients = call.optimizer.inner_optimizer.zero_waiting(call.variables, gradients)
    return gradients, weight

"""Parameters whose gradients were not finite at the last skipped update, for the error about a stuck scale."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from polyamp_tensorflow.arrays import native_variable, variable_name
from polyamp_tensorflow.compat import own_trainable_variables
from polyamp_tensorflow.own_loop.tensorflow_only.scaler_state import ApplyCall, variable_indices
from polyamp_tensorflow.step.replicas import read_shared


def count_non_finite(call: ApplyCall, gradients: Any) -> None:
    """Store the number of inf and NaN elements of each gradient; in the body of `merge_replica_calls`."""
    counts = dict.fromkeys(range(call.state.not_finite.shape[0]), tf.constant(0))
    for index, gradient in zip(variable_indices(call, call.variables), gradients, strict=True):
        finite = tf.math.is_finite(read_shared(gradient))
        counts[index] = tf.reduce_sum(tf.cast(tf.logical_not(finite), tf.int32))
    native_variable(call.state.not_finite).assign(tf.stack(list(counts.values())))


def non_finite_names(optimizer: Any, counts: Any) -> list[str]:
    """Return the paths of the variables with non-finite gradients, by the counts that `count_non_finite` stored."""
    pairs = zip(own_trainable_variables(optimizer), counts.numpy(), strict=True)
    return [variable_name(variable) for variable, count in pairs if count]

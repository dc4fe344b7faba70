"""Counts of the non-finite elements of each gradient at a skipped update, written in every replica.

`polyamp_keras.own_loop.skip_report` names the variables by them.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from polyamp_keras.arrays import native_variable
from polyamp_keras.own_loop.scaler_state import ApplyCall, variable_indices
from polyamp_tensorflow.distributed.replicas import read_shared


def count_non_finite(call: ApplyCall, gradients: Any) -> None:
    """Store the number of inf and NaN elements of each gradient; in the body of `merge_replica_calls`."""
    counts = dict.fromkeys(range(call.state.not_finite.shape[0]), tf.constant(0))
    for index, gradient in zip(variable_indices(call, call.variables), gradients, strict=True):
        finite = tf.math.is_finite(read_shared(gradient))
        counts[index] = tf.reduce_sum(tf.cast(tf.logical_not(finite), tf.int32))
    native_variable(call.state.not_finite).assign(tf.stack(list(counts.values())))

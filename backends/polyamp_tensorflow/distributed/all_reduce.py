"""Reductions over the replicas of a `tf.distribute` strategy (S9). Call them in a replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from polyamp.rules.loss_weights import TermTotals


def all_reduce_sum(gradients: Sequence[Any]) -> list[Any]:
    """Return the sum of each gradient over all replicas. The loss of each was divided by their number before.

    There is one reduction per dtype, since TensorFlow packs only tensors of one dtype and fails on mixed ones.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return list(gradients)
    sums: dict[int, Any] = {}
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        indices = [index for index, gradient in enumerate(gradients) if gradient.dtype == dtype]
        parts = [gradients[index] for index in indices]
        sums.update(zip(indices, context.all_reduce(tf.distribute.ReduceOp.SUM, parts), strict=True))
    return [sums[index] for index in range(len(gradients))]


def all_reduce_sums_and_means(sums: Any, means: Any) -> tuple[Any, Any]:
    """Return sums of some tensors over all replicas and means of others, in one reduction per dtype. Call it in a
    replica."""
    count = tf.distribute.get_replica_context().num_replicas_in_sync
    structure, members = [sums, means], keras.tree.flatten([sums, means])
    if count == 1 or not members:
        return sums, means
    sums, means = keras.tree.pack_sequence_as(structure, all_reduce_sum(members))
    return sums, keras.tree.map_structure(lambda member: member / tf.cast(count, member.dtype), means)


def all_reduce_totals(counts: Sequence[Any], parts: int) -> TermTotals:
    """Return the divisors of a sum of means, from this replica's counts over `parts` micro-batches. Call it in a
    replica. With several replicas this is a separate reduction, on which the gradients depend."""
    replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    return TermTotals(counts if replicas == 1 else all_reduce_sum(counts), parts * replicas)

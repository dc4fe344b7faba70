"""The training step on the replicas of a `tf.distribute` strategy: what each gets of the batch, and what comes back.

A state that was made in a strategy's scope is trained by all of its replicas, called from outside of them. Called by
the state and the step; `replicas` holds what happens inside, where they reduce and decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from polyamp.errors import BatchError, ModelError
from polyamp_tensorflow.arrays import leaves
from polyamp_tensorflow.precision.bound import TRAINING
from polyamp_tensorflow.step.replicas import total


def several(strategy: Any) -> bool:
    """True if the strategy has more than one replica, in this process or in others."""
    return bool(strategy.num_replicas_in_sync > 1)


def check_variables(strategy: Any, variables: Sequence[Any]) -> None:
    """Refuse variables that a strategy's replicas have no copies of.

    Raises:
        ModelError: they were created outside of its scope.
    """
    if several(strategy):
        for variable in variables:
            if not strategy.extended.variable_created_in_scope(variable):
                raise ModelError(
                    f"the variable {variable.name!r} was created outside of strategy.scope(), so the replicas have no "
                    "copies of it. Create the model and call polyamp.init inside `with strategy.scope():`."
                )


def on_replicas(strategy: Any, body: Callable[..., Any], tensors: Sequence[Any], *, split: bool) -> Any:
    """`body(*tensors)` in every replica; its results, which are the same in all of them, once.

    Args:
        strategy: the strategy, of any number of replicas.
        body: graph code.
        tensors: trees of tensors; or of distributed values, as a distributed dataset yields them, which reach each
            replica as its own.
        split: give each replica of this process an equal part along axis 0 of what is not distributed yet.

    Raises:
        BatchError: a batch that does not divide into equal parts.
    """
    if not several(strategy):
        return body(*tensors)

    divide = split and not _is_distributed(tensors)
    if divide:
        _check_parts(tensors, _local_replicas(strategy))

    training = TRAINING.get()

    def own(*tensors: Any) -> Any:
        TRAINING.set(training)  # a replica is a thread of its own
        return body(*(keras.tree.map_structure(_own_part, tree) if divide else tree for tree in tensors))

    found = strategy.run(own, args=tuple(tensors))
    return keras.tree.map_structure(lambda leaf: strategy.experimental_local_results(leaf)[0], found)


def mean(tree: Any) -> Any:
    """In a replica: the mean of each tensor over all replicas."""
    count = tf.distribute.get_replica_context().num_replicas_in_sync
    members = keras.tree.flatten(tree)
    if count == 1 or not members:
        return tree
    means = [member / tf.cast(count, member.dtype) for member in total(members)]
    return keras.tree.pack_sequence_as(tree, means)


def stacked(tree: Any) -> Any:
    """In a replica: each tensor of all replicas, stacked along a new leading axis; with one replica as it is."""
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return tree
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else context.all_gather(leaf[tf.newaxis], axis=0), tree
    )


def _local_replicas(strategy: Any) -> int:
    return len(strategy.extended.worker_devices)


def _is_distributed(tree: Any) -> bool:
    return any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in keras.tree.flatten(tree))


def _check_parts(tensors: Sequence[Any], count: int) -> None:
    for path, leaf in leaves(list(tensors)):
        if leaf.shape.rank == 0 or leaf.shape[0] is None or leaf.shape[0] % count:
            raise BatchError(
                f"batch: each of the {count} replicas of this process takes an equal part along axis 0, so its length "
                f"must be a multiple of {count}. Received: {path} of shape {tuple(leaf.shape)}."
            )


def _own_part(leaf: Any) -> Any:
    """This replica's part of a tensor."""
    if leaf is None:
        return None
    context = tf.distribute.get_replica_context()
    count = _local_replicas(context.strategy)
    size = leaf.shape[0] // count
    start = size * (context.replica_id_in_sync_group % count)
    return tf.ensure_shape(leaf[start : start + size], (size, *leaf.shape[1:]))

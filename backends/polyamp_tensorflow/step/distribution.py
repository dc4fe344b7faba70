"""The training step on the replicas of a `tf.distribute` strategy: what each gets of the batch, and what comes back.

A state that was made in a strategy's scope is trained by all of its replicas, called from outside of them. Called by
the state and the step; `replicas` holds what happens inside, where they reduce and decide.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NamedTuple

import keras
import tensorflow as tf

from polyamp.errors import BatchError, ModelError, UnsupportedError
from polyamp.rules.weights import Totals
from polyamp.rules.window import joins
from polyamp_tensorflow.arrays import leaves
from polyamp_tensorflow.compat import replicas_cannot_merge
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
        UnsupportedError: called by a replica.
    """
    if not several(strategy):
        return body(*tensors)
    if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
        raise UnsupportedError(
            "a step of polyamp runs on all replicas by itself. Received: a call inside strategy.run(...). Call "
            "train_step, value_and_grad and apply_gradients outside of it; a loop of your own in there takes "
            "polyamp_tensorflow.LossScaleOptimizer."
        )

    divide = split and not _is_distributed(tensors)
    if divide:
        _check_parts(tensors, _local_replicas(strategy))

    training = TRAINING.get()

    def own(*tensors: Any) -> Any:
        TRAINING.set(training)  # a replica is a thread of its own
        return body(*(keras.tree.map_structure(_own_part, tree) if divide else tree for tree in tensors))

    found = strategy.run(own, args=tuple(tensors))
    return keras.tree.map_structure(lambda leaf: strategy.experimental_local_results(leaf)[0], found)


def reduced(sums: Any, means: Any) -> tuple[Any, Any]:
    """In a replica: the sums of some tensors over all replicas and the means of others, in one reduction (one for each
    dtype)."""
    count = tf.distribute.get_replica_context().num_replicas_in_sync
    structure, members = [sums, means], keras.tree.flatten([sums, means])
    if count == 1 or not members:
        return sums, means
    sums, means = keras.tree.pack_sequence_as(structure, total(members))
    return sums, keras.tree.map_structure(lambda member: member / tf.cast(count, member.dtype), means)


def all_totals(counts: Sequence[Any], parts: int) -> Totals:
    """In a replica: what the terms of a sum of means are divided by, from this replica's own counts over so many
    micro-batches. With several replicas a reduction of its own: gradients wait for it."""
    replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    return Totals(counts if replicas == 1 else total(counts), parts * replicas)


def stacked(tree: Any) -> Any:
    """In a replica: each tensor of all replicas of this process, stacked along a new leading axis, or concatenated
    where their rows differ (S8); with one replica in all as it is. Nothing is sent to other processes.

    Raises:
        BatchError: the replicas' tensors do not fit together.
    """
    strategy = tf.distribute.get_strategy()
    if not several(strategy):
        return tree
    return _where_they_meet(lambda trees: keras.tree.map_structure(_one_of, *trees), tree)


class Used(NamedTuple):
    """What the replicas' losses depend on (S23).

    Attributes:
        here: by state, the parameters that some replica of this process uses.
        sent: by state, those whose gradients are reduced: in several processes all, since each compiles for itself.
        flags: by state, 1 or 0 for every parameter, to be averaged with the gradients; empty where one process trains.
    """

    here: list[list[str]]
    sent: list[list[str]]
    flags: list[Any]


def used(every: Sequence[Sequence[str]], own: Sequence[Collection[str]]) -> Used:
    """In a replica: what is used, from this replica's own.

    Args:
        every: by state, its parameters.
        own: by state, those that this replica's loss depends on.
    """
    strategy = tf.distribute.get_strategy()
    parts = _where_they_meet(lambda parts: parts, [set(names) for names in own])
    union = [set[str]().union(*names) for names in zip(*parts, strict=True)]
    here = [[name for name in names if name in taken] for names, taken in zip(every, union, strict=True)]
    if strategy.num_replicas_in_sync == _local_replicas(strategy):
        return Used(here, here, [])
    flags = [[float(name in taken) for name in names] for names, taken in zip(every, union, strict=True)]
    return Used(here, [list(names) for names in every], [tf.constant(own, tf.float32) for own in flags])


def check_used(every: Sequence[Sequence[str]], means: Sequence[Any]) -> None:
    """In a replica: refuse a parameter that one process uses and another does not, on all of them.

    Args:
        every: by state, its parameters.
        means: the flags of `used`, averaged; empty where one process trains.

    Raises (when the graph runs):
        tf.errors.InvalidArgumentError: says so; `graph` makes an `UnsupportedError` of it.
    """
    for names, flags in zip(every, means, strict=False):
        apart = (flags > 0.0) & (flags < 1.0)
        named = tf.strings.reduce_join(tf.boolean_mask(tf.constant(list(names)), apart), separator=", ")
        tf.debugging.Assert(tf.logical_not(tf.reduce_any(apart)), [USED_APART, named], summarize=8)


USED_APART: Final = (
    "the loss depends on a parameter in one process and not in another, and the processes compile their steps each "
    "for itself. Add 0.0 times the parameter to the loss where it is not used. Received:"
)


class _Box:
    """Holds what `merge_call` is not to take apart."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _where_they_meet(function: Callable[[list[Any]], Any], own: Any) -> Any:
    """In a replica: `function` of what the replicas of this process give, called once, in their order."""
    if replicas_cannot_merge():
        raise UnsupportedError("XLA around strategy.run on GPUs leaves replicas no place to meet. Drop jit_compile.")

    def merged(strategy: Any, boxes: Any) -> Any:
        return _Box(function([box.value for box in strategy.experimental_local_results(boxes)]))

    found: _Box = tf.distribute.get_replica_context().merge_call(merged, args=(_Box(own),))
    return found.value


def _local_replicas(strategy: Any) -> int:
    return len(strategy.extended.worker_devices)


def _one_of(*leaves: Any) -> Any:
    """A leaf of aux of all replicas of this process."""
    if leaves[0] is None:
        return None
    least = min(leaf.shape.rank for leaf in leaves)  # one more: an even window's, beside those of an uneven one (S8)
    flat = [leaf if leaf.shape.rank == least else tf.reshape(leaf, (-1, *leaf.shape[2:])) for leaf in leaves]
    put_together = tf.concat if joins([tuple(leaf.shape) for leaf in flat]) else tf.stack
    return put_together(flat, axis=0)


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

"""Training step on the replicas of a `tf.distribute` strategy: division of the batch, and collection of the results.

All replicas train a state that was created in the strategy's scope; the step is called outside the replicas.
`all_reduce` has the reductions inside them, `replicas` the decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NamedTuple

import keras
import tensorflow as tf

from polyamp.errors import BatchError, UnsupportedError
from polyamp.rules.accumulation import is_concatenated
from polyamp_keras.arrays import leaves_with_paths
from polyamp_tensorflow.compat import is_merge_call_unavailable
from polyamp_tensorflow.distributed.replicas import has_several_replicas
from polyamp_tensorflow.precision.policy_module import TRAINING_MODE


def run_on_replicas(strategy: Any, body: Callable[..., Any], tensors: Sequence[Any], *, split: bool) -> Any:
    """Run `body(*tensors)` in every replica, and return the results of one: they are equal on all replicas.

    Args:
        strategy: the strategy, with any number of replicas.
        body: graph code.
        tensors: trees of tensors, or of distributed values from a distributed dataset, of which each replica gets its
            own.
        split: whether each replica of this process gets an equal part along axis 0 of tensors that are not distributed.

    Raises:
        BatchError: a batch that does not divide into equal parts.
        UnsupportedError: the call is inside a replica.
    """
    if not has_several_replicas(strategy):
        return body(*tensors)
    if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
        raise UnsupportedError(
            "a step of polyamp runs on all replicas by itself. Received: a call inside strategy.run(...). Call "
            "train_step, value_and_grad and apply_gradients outside of it; a loop of your own in there takes "
            "polyamp_tensorflow.LossScaleOptimizer."
        )

    divide = split and not _is_distributed(tensors)
    if divide:
        _check_divisible(tensors, _local_replica_count(strategy))

    training = TRAINING_MODE.get()

    def run_body(*tensors: Any) -> Any:
        TRAINING_MODE.set(training)  # each replica has its own thread
        return body(*(keras.tree.map_structure(_replica_slice, tree) if divide else tree for tree in tensors))

    found = strategy.run(run_body, args=tuple(tensors))
    return keras.tree.map_structure(lambda leaf: strategy.experimental_local_results(leaf)[0], found)


def stack_over_replicas(tree: Any) -> Any:
    """Stack each tensor over the replicas of this process along a new leading axis, or concatenate them if their rows
    differ (S8). Call it in a replica. With one replica in total it is unchanged; other processes are not involved.

    Raises:
        BatchError: the replicas' tensors have incompatible shapes.
    """
    strategy = tf.distribute.get_strategy()
    if not has_several_replicas(strategy):
        return tree
    return _merge_over_replicas(lambda trees: keras.tree.map_structure(_join_replica_leaves, *trees), tree)


class UsedParameters(NamedTuple):
    """Parameters on which the replicas' losses depend (S23), by state number and name.

    Attributes:
        local: those that any replica of this process uses.
        reduced: those whose gradients are reduced: all with several processes, as each compiles alone.
        flags: one vector, 1 or 0 for every parameter, to be averaged with the gradients; empty with a single process.
    """

    local: list[tuple[int, str]]
    reduced: list[tuple[int, str]]
    flags: list[Any]


def find_used_parameters(parameters: Sequence[tuple[int, str]], own: Collection[tuple[int, str]]) -> UsedParameters:
    """Return the used parameters of all replicas of this process. Call it in a replica.

    Args:
        parameters: all parameters.
        own: those on which this replica's loss depends.
    """
    strategy = tf.distribute.get_strategy()
    union = _merge_over_replicas(lambda parts: set().union(*parts), set(own))
    local = [key for key in parameters if key in union]
    if strategy.num_replicas_in_sync == _local_replica_count(strategy):
        return UsedParameters(local, local, [])
    return UsedParameters(
        local, list(parameters), [tf.constant([float(key in union) for key in parameters], tf.float32)]
    )


def check_used_parameters(parameters: Sequence[tuple[int, str]], means: Sequence[Any]) -> None:
    """Raise on all processes if one uses a parameter and another does not. Call it in a replica.

    Args:
        parameters: all parameters.
        means: the averaged flags of `find_used_parameters`; empty with a single process.

    Raises (when the graph runs):
        tf.errors.InvalidArgumentError: names the parameters; `error_hints` converts it to an `UnsupportedError`.
    """
    for flags in means:
        apart = (flags > 0.0) & (flags < 1.0)
        names = tf.boolean_mask(tf.constant([name for _, name in parameters]), apart)
        listed = tf.strings.reduce_join(names, separator=", ")
        tf.debugging.Assert(tf.logical_not(tf.reduce_any(apart)), [USED_PARAMETERS_DIFFER, listed], summarize=8)


USED_PARAMETERS_DIFFER: Final = (
    "the loss depends on a parameter in one process and not in another, and the processes compile their steps each "
    "for itself. Add 0.0 times the parameter to the loss where it is not used. Received:"
)


class _OpaqueBox:
    """Wrapper of a value that `merge_call` must not flatten."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _merge_over_replicas(function: Callable[[list[Any]], Any], own: Any) -> Any:
    """Call `function` once with the values of this process's replicas, in order. Call it in a replica."""
    if is_merge_call_unavailable():
        raise UnsupportedError("XLA around strategy.run on GPUs leaves replicas no place to meet. Drop jit_compile.")

    def call_once(strategy: Any, boxes: Any) -> Any:
        return _OpaqueBox(function([box.value for box in strategy.experimental_local_results(boxes)]))

    found: _OpaqueBox = tf.distribute.get_replica_context().merge_call(call_once, args=(_OpaqueBox(own),))
    return found.value


def _local_replica_count(strategy: Any) -> int:
    return len(strategy.extended.worker_devices)


def _join_replica_leaves(*leaves: Any) -> Any:
    """Join a leaf of aux over the replicas of this process."""
    if leaves[0] is None:
        return None
    least = min(leaf.shape.rank for leaf in leaves)  # one more: of an even accumulation, next to an uneven one (S8)
    flat = [leaf if leaf.shape.rank == least else tf.reshape(leaf, (-1, *leaf.shape[2:])) for leaf in leaves]
    put_together = tf.concat if is_concatenated([tuple(leaf.shape) for leaf in flat]) else tf.stack
    return put_together(flat, axis=0)


def _is_distributed(tree: Any) -> bool:
    return any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in keras.tree.flatten(tree))


def _check_divisible(tensors: Sequence[Any], count: int) -> None:
    for path, leaf in leaves_with_paths(list(tensors)):
        if leaf.shape.rank == 0 or leaf.shape[0] is None or leaf.shape[0] % count:
            raise BatchError(
                f"batch: each of the {count} replicas of this process takes an equal part along axis 0, so its length "
                f"must be a multiple of {count}. Received: {path} of shape {tuple(leaf.shape)}."
            )


def _replica_slice(leaf: Any) -> Any:
    """Return this replica's part of a tensor."""
    if leaf is None:
        return None
    context = tf.distribute.get_replica_context()
    count = _local_replica_count(context.strategy)
    size = leaf.shape[0] // count
    start = size * (context.replica_id_in_sync_group % count)
    return tf.ensure_shape(leaf[start : start + size], (size, *leaf.shape[1:]))

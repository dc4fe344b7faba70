"""Replicas of a `tf.distribute` strategy: checks, and one decision for all of them.

    all_reduce_sum(gradients)            in each replica: sum over the replicas (S9: before unscaling)
    merge_replica_calls(body, values)    `body` once for the replicas of this process; writes may be under a condition

A `tf.cond` in a replica context cannot contain the update of a Keras optimizer, which merges the replicas and, in
`apply`, reduces the gradients. So the condition is in the cross-replica context, and the gradients are reduced before
it. `skip_gradient_reduction` prevents a second reduction by the optimizer. No replica communicates under a condition,
so none can wait for another that decided differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import tensorflow as tf

from polyamp.errors import LossScaleError, ModelError, UnsupportedError
from polyamp_keras.arrays import native_variable
from polyamp_keras.own_loop.optimizer_checks import optimizer_members
from polyamp_tensorflow.compat import is_merge_call_unavailable

ReplicaRun = Callable[..., Any]
"""`run(function, *args)`: runs the function in every replica of this process, each with its part of the arguments."""

_SUPPORTED_STRATEGIES: Final = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.OneDeviceStrategy,
)


def find_replicas() -> Any:
    """Return the strategy of the current scope, whose replicas train a state; TensorFlow's default one for one replica.

    Raises:
        UnsupportedError: replicas that update independently, or devices with their own programming model.
    """
    strategy = tf.distribute.get_strategy()
    if has_several_replicas(strategy):
        check_strategy(strategy)
    return strategy


def has_several_replicas(strategy: Any) -> bool:
    """Return whether the strategy has more than one replica, in this process or in others."""
    return bool(strategy.num_replicas_in_sync > 1)


def check_strategy(strategy: Any) -> None:
    """Raise for a strategy whose replicas cannot make one decision.

    Raises:
        UnsupportedError: replicas that update independently, or devices with their own programming model.
    """
    if not isinstance(strategy, _SUPPORTED_STRATEGIES):
        raise UnsupportedError(
            f"polyamp trains under {', '.join(known.__name__ for known in _SUPPORTED_STRATEGIES)}, whose replicas "
            "update together. "
            f"Received: {type(strategy).__name__} with {strategy.num_replicas_in_sync} replicas."
        )


def check_context() -> None:
    """Raise for a context or a strategy in which replicas cannot make one decision.

    Raises:
        LossScaleError: the call is outside the replicas.
        UnsupportedError: a strategy whose replicas update independently.
    """
    if tf.distribute.in_cross_replica_context():
        raise LossScaleError(
            "apply() must be called by each replica, inside strategy.run(...). Received: a call in the cross-replica "
            "context. Put the whole training step into the function that strategy.run is given."
        )
    if tf.distribute.has_strategy():
        check_strategy(tf.distribute.get_strategy())


def check_replica_variables(strategy: Any, variables: Sequence[Any]) -> None:
    """Raise for variables without copies on a strategy's replicas.

    Raises:
        ModelError: a variable was created outside the strategy's scope.
    """
    if has_several_replicas(strategy):
        for variable in variables:
            if not strategy.extended.variable_created_in_scope(variable):
                raise ModelError(
                    f"the variable {variable.name!r} was created outside of strategy.scope(), so the replicas have no "
                    "copies of it. Create the model and call polyamp.init inside `with strategy.scope():`."
                )


def check_replicated(optimizer: Any) -> None:
    """Raise for an optimizer that does not work on the replicas of the current strategy.

    Raises:
        LossScaleError: one of its variables has no copies on the replicas.
        UnsupportedError: a setting with which Keras's optimizers fail on replicas.
    """
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync == 1:
        return
    if not all(
        strategy.extended.variable_created_in_scope(native_variable(variable)) for variable in optimizer.variables
    ):
        raise LossScaleError(
            "optimizer: it was created outside of strategy.scope(), so the replicas have no copies of its variables. "
            "Create it, and a LossScaleOptimizer around it, inside `with strategy.scope():`."
        )
    if any(member.use_ema and member.ema_overwrite_frequency for member in optimizer_members(optimizer)):
        raise UnsupportedError(
            f"optimizer: {type(optimizer).__qualname__}(ema_overwrite_frequency=...) fails on several replicas in "
            "Keras. Leave it unset; `fit` writes the moving average to the model when it ends."
        )


def merge_replica_calls(body: Callable[[ReplicaRun, Any], None], values: Any) -> None:
    """Call `body(run, values)` once for all replicas of this process, with a tree of values: tuples, lists, dicts.

    In `body` each leaf contains those of all replicas. `run` and `assign` of a variable distribute them, `read_shared`
    reads a value that is equal on all replicas. Writes in `body` may be under a condition.
    """
    if is_merge_call_unavailable():
        body(lambda function, *args: function(*args), values)
        return

    def call_once(strategy: Any, values: Any) -> None:
        body(lambda function, *args: strategy.extended.call_for_each_replica(function, args=args), values)

    tf.distribute.get_replica_context().merge_call(call_once, args=(values,))


def read_shared(value: Any) -> Any:
    """Return a value that is equal on all replicas as one tensor, in the body of `merge_replica_calls`."""
    return tf.distribute.get_strategy().experimental_local_results(value)[0]

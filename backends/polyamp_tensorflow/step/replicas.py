"""What loss scaling needs of `tf.distribute`: one reduction of the gradients, and one decision for all replicas.

    total(gradients)        in each replica: their sum over the replicas (S9: before unscaling)
    together(body, values)  `body` once for the replicas of this process, where a condition may hold writes

A `tf.cond` in a replica's own context cannot hold what Keras's optimizers do there: they merge the replicas and, in
`apply`, reduce the gradients. So the condition stands where all replicas meet, the gradients are reduced before it, and
`reduced_already` keeps the optimizer inside from reducing them again. No replica communicates under a condition, so
none can wait for another that decided otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import tensorflow as tf

from polyamp.errors import LossScaleError, UnsupportedError
from polyamp_tensorflow.arrays import raw
from polyamp_tensorflow.compat import REDUCE, check_methods, replicas_cannot_merge
from polyamp_tensorflow.interrupts import ending
from polyamp_tensorflow.step.optimizer_checks import members

Run = Callable[..., Any]
"""`run(function, *args)`: the function in every replica of this process, each with its own part of the arguments."""

_KNOWN: Final = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.OneDeviceStrategy,
)


def check_strategy(strategy: Any) -> None:
    """Refuse a strategy whose replicas cannot take one decision.

    Raises:
        UnsupportedError: replicas that update on their own, or devices with a programming model of their own.
    """
    if not isinstance(strategy, _KNOWN):
        raise UnsupportedError(
            f"polyamp trains under {', '.join(known.__name__ for known in _KNOWN)}, whose replicas update together. "
            f"Received: {type(strategy).__name__} with {strategy.num_replicas_in_sync} replicas."
        )


def check_context() -> None:
    """Refuse a place or a strategy where replicas cannot take one decision.

    Raises:
        LossScaleError: outside of the replicas.
        UnsupportedError: a strategy whose replicas update on their own.
    """
    if tf.distribute.in_cross_replica_context():
        raise LossScaleError(
            "apply() must be called by each replica, inside strategy.run(...). Received: a call in the cross-replica "
            "context. Put the whole training step into the function that strategy.run is given."
        )
    if tf.distribute.has_strategy():
        check_strategy(tf.distribute.get_strategy())


def check_replicated(optimizer: Any) -> None:
    """Refuse an optimizer that cannot work on the replicas of the present strategy.

    Raises:
        LossScaleError: one of its variables has no copies on the replicas.
        UnsupportedError: a setting that Keras's optimizers fail with there.
    """
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync == 1:
        return
    if not all(strategy.extended.variable_created_in_scope(raw(variable)) for variable in optimizer.variables):
        raise LossScaleError(
            "optimizer: it was created outside of strategy.scope(), so the replicas have no copies of its variables. "
            "Create it, and a LossScaleOptimizer around it, inside `with strategy.scope():`."
        )
    if any(member.use_ema and member.ema_overwrite_frequency for member in members(optimizer)):
        raise UnsupportedError(
            f"optimizer: {type(optimizer).__qualname__}(ema_overwrite_frequency=...) fails on several replicas in "
            "Keras. Leave it unset; `fit` writes the moving average to the model when it ends."
        )


def total(gradients: Sequence[Any]) -> list[Any]:
    """The sum of each gradient over all replicas; the loss of each was divided by their number beforehand.

    One reduction for each dtype: TensorFlow packs tensors of one dtype into one, and fails on others.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return list(gradients)
    sums: dict[int, Any] = {}
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        places = [place for place, gradient in enumerate(gradients) if gradient.dtype == dtype]
        parts = [gradients[place] for place in places]
        sums.update(zip(places, context.all_reduce(tf.distribute.ReduceOp.SUM, parts), strict=True))
    return [sums[place] for place in range(len(gradients))]


def together(body: Callable[..., None], *values: Any) -> None:
    """`body(run, *values)` once for all replicas of this process.

    There each value is that of every replica: `run` hands them out, `assign` of a variable too, and `shared` reads one
    that all replicas agree on. `body` may put writes under a condition.
    """
    if replicas_cannot_merge():
        body(lambda function, *args: function(*args), *values)
        return

    def merged(strategy: Any, *values: Any) -> None:
        body(lambda function, *args: strategy.extended.call_for_each_replica(function, args=args), *values)

    tf.distribute.get_replica_context().merge_call(merged, args=values)


def shared(value: Any) -> Any:
    """A value that is the same in all replicas, as one tensor, for the body of `together`."""
    return tf.distribute.get_strategy().experimental_local_results(value)[0]


@contextlib.contextmanager
def reduced_already(optimizer: Any) -> Iterator[None]:
    """Let a Keras optimizer take gradients as they are: `total` has summed them over the replicas.

    Raises:
        UnsupportedError: this version of Keras reduces gradients somewhere else.
    """
    parts = members(optimizer)
    purpose = "from adding up gradients over the replicas twice"
    check_methods(optimizer, parts, [REDUCE], purpose=purpose, instead="train on one replica")

    def put_back() -> None:
        for part in parts:
            vars(part).pop(REDUCE, None)

    with ending(put_back):
        for part in parts:
            object.__setattr__(part, REDUCE, lambda pairs: pairs)
        yield

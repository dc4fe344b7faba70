"""Around a skipped update: whether `scale_loss` was forgotten, and what running statistics were.

Called by `LossScaleOptimizer`; none of it is saved.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final

import tensorflow as tf

from polyamp.errors import LossScaleError, ModelError, UnsupportedError
from polyamp_tensorflow.arrays import raw, write
from polyamp_tensorflow.compat import FunctionGraph
from polyamp_tensorflow.models.layers import is_built
from polyamp_tensorflow.models.variables import Variables, variables_of
from polyamp_tensorflow.step import replicas
from polyamp_tensorflow.step.writes import PREFIX, EagerReads, ForwardWrites, Written, dtypes_of


class ScaleCalls:
    """Which calls of `scale_loss` are known, to notice that one was forgotten.

    An eager call counts for one `apply`. A call in a graph is seen once, while its function is traced, and belongs to
    every `apply` of that function. One that no `apply` there uses up is open: its gradients leave the function, so it
    may belong to any `apply` anywhere from then on.
    """

    def __init__(self) -> None:
        self._eager = False
        self._open = 0
        self._by_function: weakref.WeakKeyDictionary[Any, list[weakref.ref[Any]]] = weakref.WeakKeyDictionary()

    def note(self) -> None:
        """`scale_loss` was called."""
        if tf.executing_eagerly():
            self._eager = True
            return
        graph = tf.compat.v1.get_default_graph()
        self._by_function.setdefault(_function(graph), []).append(weakref.ref(graph))
        self._open += 1

    def consume(self) -> None:
        """`apply` was called.

        Raises:
            LossScaleError: no call of `scale_loss` can belong to it.
        """
        eager = tf.executing_eagerly()
        graph = None if eager else tf.compat.v1.get_default_graph()
        calls = None if eager else self._by_function.get(_function(graph))
        if calls is None and not (self._eager or self._open):
            where = "since the last update" if eager else "in its function"
            raise LossScaleError(
                f"apply() was called, but scale_loss() was not {where}: dividing by the scale would shrink correct "
                "gradients. Differentiate scaled = optimizer.scale_loss(loss), once for each apply()."
            )
        if eager:
            self._eager = False
        elif calls and (graph is _function(graph) or graph is calls[-1]()):
            calls.pop()
            self._open -= 1  # not by an `apply` under a condition, which may leave gradients to be applied elsewhere


class Statistics:
    """What one forward pass wrote, in a `keep_statistics` block: `apply` sends it along with the gradients.

    Args:
        variables: the running statistics.
        writes: the parameters that the pass writes by itself.
        start: of those that it wrote, their values before the pass, or at the start of the window.

    Attributes:
        variables: as given.
        means: their means over the replicas, once `apply` was called.
        written, before: the parameters that the pass wrote, and what `start` gave for them, once `apply` was called.
    """

    def __init__(
        self, variables: list[Any], writes: ForwardWrites, start: Callable[[Mapping[str, Written]], list[Any]]
    ) -> None:
        self.variables = variables
        self.means: list[Any] | None = None
        self.written: list[Any] = []
        self.before: list[Any] = []
        self._writes: ForwardWrites | None = writes
        self._start = start

    def end_pass(self, updated: Sequence[Any] | None = None) -> None:
        """The forward pass is over: the parameters that it wrote from 16-bit numbers get the digits back that it did
        not change. A second call does nothing: what is written then is an update.

        Args:
            updated: the parameters that are about to be updated; others may be another optimizer's. None for all.
        """
        if self._writes is None:
            return
        found = self._writes.found(None if updated is None else {id(raw(variable)) for variable in updated})
        self._writes = None
        self.written = [each.variable for each in found.values()]
        self.before = self._start(found)
        for each in found.values():
            if each.narrow:
                each.variable.assign(each.after)


STATISTICS: Final[ContextVar[Statistics | None]] = ContextVar("statistics", default=None)
"""Those of the block that is open in this replica, which is a thread of its own."""


def total_with_statistics(gradients: Sequence[Any]) -> list[Any]:
    """`replicas.total` of the gradients, and in the same reduction the means of the open block's statistics."""
    seen, count = STATISTICS.get(), tf.distribute.get_replica_context().num_replicas_in_sync
    if seen is None or count == 1:
        return replicas.total(gradients)
    sums = replicas.total([*gradients, *(tf.identity(variable) for variable in seen.variables)])
    seen.means = [total / tf.cast(count, total.dtype) for total in sums[len(gradients) :]]
    return sums[: len(gradients)]


class WindowStarts:
    """By model, variables for what running statistics were at the first micro-batch of a window.

    No file holds them. In a window that was open when the model was saved, they are what the file held.
    """

    def __init__(self) -> None:
        self._variables: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        self._known: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._reads: weakref.WeakKeyDictionary[Any, EagerReads] = weakref.WeakKeyDictionary()
        self._written: weakref.WeakKeyDictionary[Any, dict[str, tuple[Any, Any]]] = weakref.WeakKeyDictionary()

    def of(self, model: Any) -> list[Any]:
        """The model's; created at the first call."""
        if model not in self._variables:
            with tf.init_scope():
                self._variables[model] = [
                    tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)
                    for variable in running_statistics(model)
                ]
                self._known[model] = tf.Variable(0, trainable=False, name="window_start_known")
        return self._variables[model]

    def kept(self, model: Any, values: list[Any], micro_step: Any) -> list[Any]:
        """The model's variables, after `values` were written to them if this is the first micro-batch of a window, or
        the first one of all."""
        held = self.of(model)
        known = self._known[model]

        def decide(_: replicas.Run, values: Sequence[Any]) -> None:
            begins = tf.equal(micro_step, 0) | tf.equal(known, 0)
            tf.cond(begins, lambda: write([*held, known], [*values, 1]), lambda: None)

        replicas.together(decide, values)
        return held

    def watch(
        self, model: Any, variables: Variables, micro_step: Any
    ) -> tuple[ForwardWrites, Callable[[Mapping[str, Written]], list[Any]]]:
        """What `Statistics` needs of the parameters that a forward pass of the model writes.

        Args:
            model: the model.
            variables: its variables.
            micro_step: calls since the window began; None without a window.
        """
        reads = self._reads.setdefault(model, EagerReads())

        def start(found: Mapping[str, Written]) -> list[Any]:
            if micro_step is not None:
                return self.written(model, found, micro_step)
            return [each.before for each in found.values()]

        return ForwardWrites(variables, reads, functools.partial(dtypes_of, model)), start

    def written(self, model: Any, found: Mapping[str, Written], micro_step: Any) -> list[Any]:
        """The same for parameters that the forward pass writes, whose variables are made when the first is traced.

        Raises:
            UnsupportedError: several replicas, where nothing can be made then.
        """
        if found and tf.distribute.get_strategy().num_replicas_in_sync > 1:
            raise UnsupportedError(
                f"{next(iter(found)).removeprefix(PREFIX)!r} is a parameter that the forward pass writes. With "
                "accumulate_steps on several replicas polyamp cannot take such a write back at the end of a window. "
                "Use accumulate_steps=1, or polyamp.train_step."
            )
        held = self._written.setdefault(model, {})
        for name, each in found.items():
            if name not in held:
                with tf.init_scope():
                    start = tf.Variable(tf.zeros(each.before.shape, each.before.dtype), trainable=False)
                    held[name] = (start, tf.Variable(0, trainable=False))
            start, known = held[name]
            values = (start, known, each.before)
            tf.cond(tf.equal(micro_step, 0) | tf.equal(known, 0), functools.partial(_begin, *values), lambda: None)
        return [held[name][0] for name in found]


def _begin(start: Any, known: Any, value: Any) -> None:
    start.assign(value)
    known.assign(1)


def _function(graph: Any) -> Any:
    """The graph of the function that a graph, perhaps a condition's or a loop's body, lies in."""
    plain = FunctionGraph
    while isinstance(graph, plain) and type(graph) is not plain and isinstance(graph.outer_graph, plain):
        graph = graph.outer_graph
    return graph


def statistics_of(model: Any) -> Variables:
    """The model's variables by role, with its running statistics.

    Raises:
        ModelError: a model that is not built.
    """
    if not is_built(model):
        raise ModelError(
            "running statistics are known only of a built model. Build it or call it once first, or give its first "
            "layer an Input."
        )
    return variables_of(model)


def running_statistics(model: Any) -> list[Any]:
    """What the model's forward pass writes, but for the seeds of random numbers. Raises as `statistics_of`."""
    return [raw(variable) for variable in statistics_of(model).left_by_a_forward_pass.values()]


def not_finite(gradient: Any) -> Any:
    """How many elements of a gradient are inf or NaN, int32 scalar."""
    return tf.reduce_sum(tf.cast(tf.logical_not(tf.math.is_finite(gradient)), tf.int32))


@contextlib.contextmanager
def keep_statistics(
    model: Any, starts: WindowStarts, micro_step: Any, was_skipped: Callable[[], Any]
) -> Iterator[None]:
    """The block of `LossScaleOptimizer.keep_statistics`.

    Args:
        model: a built Keras model or layer.
        starts: what the variables were when the window began.
        micro_step: calls since then; None without a window.
        was_skipped: whether the update of this block was, boolean scalar.
    """
    variables = statistics_of(model)
    running = [raw(variable) for variable in variables.left_by_a_forward_pass.values()]
    before = [tf.identity(variable) for variable in running]
    seen = Statistics(running, *starts.watch(model, variables, micro_step))
    if micro_step is not None:
        before = starts.kept(model, before, micro_step)
    token = STATISTICS.set(seen)
    try:
        yield
    except BaseException:
        if tf.executing_eagerly() and not tf.distribute.has_strategy():
            seen.end_pass()
            write([*running, *seen.written], [*before, *seen.before])
        raise
    finally:
        STATISTICS.reset(token)
    seen.end_pass()
    left = [*running, *seen.written]

    def decide(_: replicas.Run, before: Sequence[Any], means: Sequence[Any]) -> None:
        keep = functools.partial(write, running[: len(means)], means)
        tf.cond(was_skipped(), lambda: write(left, before), keep)

    if left:
        replicas.together(decide, [*before, *seen.before], seen.means or [])

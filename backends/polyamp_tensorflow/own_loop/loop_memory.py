"""Tracking of `scale_loss` calls, and of running statistics to restore after a skipped update.

None of it is saved.
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
from polyamp_tensorflow.arrays import assign_values, native_variable
from polyamp_tensorflow.compat import FunctionGraph
from polyamp_tensorflow.models.layers import is_built
from polyamp_tensorflow.models.variables import ModelVariables, model_variables
from polyamp_tensorflow.step import replicas
from polyamp_tensorflow.step.parameter_writes import (
    WRITE_PREFIX,
    EagerReader,
    ForwardWriteTracker,
    ParameterWrite,
    variable_compute_dtypes,
)


class ScaleLossCalls:
    """Record of the calls of `scale_loss`, to detect a missing one.

    An eager call counts for one `apply`. A call in a graph is recorded once, during tracing, and counts for every
    `apply` of that function. A call that no `apply` in its function consumes is open: its gradients leave the function,
    so it may belong to any later `apply`.
    """

    def __init__(self) -> None:
        self._eager = False
        self._open = 0
        self._by_function: weakref.WeakKeyDictionary[Any, list[weakref.ref[Any]]] = weakref.WeakKeyDictionary()

    def note(self) -> None:
        """Record a call of `scale_loss`."""
        if tf.executing_eagerly():
            self._eager = True
            return
        graph = tf.compat.v1.get_default_graph()
        self._by_function.setdefault(_outer_function_graph(graph), []).append(weakref.ref(graph))
        self._open += 1

    def consume(self) -> None:
        """Record a call of `apply`.

        Raises:
            LossScaleError: no call of `scale_loss` can belong to it.
        """
        eager = tf.executing_eagerly()
        graph = None if eager else tf.compat.v1.get_default_graph()
        calls = None if eager else self._by_function.get(_outer_function_graph(graph))
        if calls is None and not (self._eager or self._open):
            where = "since the last update" if eager else "in its function"
            raise LossScaleError(
                f"apply() was called, but scale_loss() was not {where}: dividing by the scale would shrink correct "
                "gradients. Differentiate scaled = optimizer.scale_loss(loss), once for each apply()."
            )
        if eager:
            self._eager = False
        elif calls and (graph is _outer_function_graph(graph) or graph is calls[-1]()):
            calls.pop()
            self._open -= 1  # not for an `apply` under a condition: its gradients may be applied elsewhere


class ForwardPassStatistics:
    """Variables that one forward pass wrote in a `keep_statistics` block. `apply` reduces them with the gradients.

    Args:
        variables: the running statistics.
        writes: tracker of the parameters that the pass itself writes.
        start: returns the values of those parameters before the pass, or at the start of the accumulation.

    Attributes:
        variables: as given.
        means: their means over the replicas; None before `apply`.
        written, before: the parameters that the pass wrote, and the result of `start`; empty before `apply`.
    """

    def __init__(
        self,
        variables: list[Any],
        writes: ForwardWriteTracker,
        start: Callable[[Mapping[str, ParameterWrite]], list[Any]],
    ) -> None:
        self.variables = variables
        self.means: list[Any] | None = None
        self.written: list[Any] = []
        self.before: list[Any] = []
        self._writes: ForwardWriteTracker | None = writes
        self._start = start

    def end_pass(self, updated: Sequence[Any] | None = None) -> None:
        """End the forward pass: restore the unchanged digits of parameters that it wrote from 16-bit numbers.

        A second call does nothing, since later writes are updates.

        Args:
            updated: the parameters to be updated; others may belong to another optimizer. None for all.
        """
        if self._writes is None:
            return
        found = self._writes.found(None if updated is None else {id(native_variable(variable)) for variable in updated})
        self._writes = None
        self.written = [each.variable for each in found.values()]
        self.before = self._start(found)
        for each in found.values():
            if each.narrow:
                each.variable.assign(each.after)


CURRENT_STATISTICS: Final[ContextVar[ForwardPassStatistics | None]] = ContextVar("statistics", default=None)
"""Statistics of the active block in this replica; each replica has its own thread."""


def sum_gradients_and_statistics(gradients: Sequence[Any]) -> list[Any]:
    """Sum gradients over the replicas, and average the active block's statistics in the same reduction."""
    seen, count = CURRENT_STATISTICS.get(), tf.distribute.get_replica_context().num_replicas_in_sync
    if seen is None or count == 1:
        return replicas.sum_over_replicas(gradients)
    sums = replicas.sum_over_replicas([*gradients, *(tf.identity(variable) for variable in seen.variables)])
    seen.means = [total / tf.cast(count, total.dtype) for total in sums[len(gradients) :]]
    return sums[: len(gradients)]


class AccumulationStartValues:
    """Variables with the running statistics of each model at the first micro-batch of an accumulation.

    They are not saved. If the model was saved during an accumulation, the saved statistics are used.
    """

    def __init__(self) -> None:
        self._variables: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        self._known: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._reads: weakref.WeakKeyDictionary[Any, EagerReader] = weakref.WeakKeyDictionary()
        self._written: weakref.WeakKeyDictionary[Any, dict[str, tuple[Any, Any]]] = weakref.WeakKeyDictionary()

    def of(self, model: Any) -> list[Any]:
        """Return the variables of a model; create them at the first call."""
        if model not in self._variables:
            with tf.init_scope():
                self._variables[model] = [
                    tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)
                    for variable in running_statistics(model)
                ]
                self._known[model] = tf.Variable(0, trainable=False, name="window_start_known")
        return self._variables[model]

    def kept(self, model: Any, values: list[Any], micro_step: Any) -> list[Any]:
        """Return the variables of a model. At the first micro-batch, of an accumulation or ever, write `values` to them
        first."""
        held = self.of(model)
        known = self._known[model]

        def decide(_: replicas.ReplicaRun, values: Sequence[Any]) -> None:
            begins = tf.equal(micro_step, 0) | tf.equal(known, 0)
            tf.cond(begins, lambda: assign_values([*held, known], [*values, 1]), lambda: None)

        replicas.merge_replica_calls(decide, values)
        return held

    def watch(
        self, model: Any, variables: ModelVariables, micro_step: Any
    ) -> tuple[ForwardWriteTracker, Callable[[Mapping[str, ParameterWrite]], list[Any]]]:
        """Return the `writes` and `start` arguments of `ForwardPassStatistics`.

        Args:
            model: the model.
            variables: its variables.
            micro_step: calls since the start of the accumulation; None without accumulation.
        """
        reads = self._reads.setdefault(model, EagerReader())

        def start(found: Mapping[str, ParameterWrite]) -> list[Any]:
            if micro_step is not None:
                return self.written(model, found, micro_step)
            return [each.before for each in found.values()]

        return ForwardWriteTracker(variables, reads, functools.partial(variable_compute_dtypes, model)), start

    def written(self, model: Any, found: Mapping[str, ParameterWrite], micro_step: Any) -> list[Any]:
        """Return the start values of parameters that the forward pass writes. Their variables are created in tracing.

        Raises:
            UnsupportedError: several replicas, where no variable can be created in tracing.
        """
        if found and tf.distribute.get_strategy().num_replicas_in_sync > 1:
            raise UnsupportedError(
                f"{next(iter(found)).removeprefix(WRITE_PREFIX)!r} is a parameter that the forward pass writes. With "
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
            tf.cond(
                tf.equal(micro_step, 0) | tf.equal(known, 0),
                functools.partial(_write_start_value, *values),
                lambda: None,
            )
        return [held[name][0] for name in found]


def _write_start_value(start: Any, known: Any, value: Any) -> None:
    start.assign(value)
    known.assign(1)


def _outer_function_graph(graph: Any) -> Any:
    """Return the graph of the function that contains a graph, which may be a condition's or a loop's body."""
    plain = FunctionGraph
    while isinstance(graph, plain) and type(graph) is not plain and isinstance(graph.outer_graph, plain):
        graph = graph.outer_graph
    return graph


def statistics_variables(model: Any) -> ModelVariables:
    """Return the model's variables by role, with its running statistics.

    Raises:
        ModelError: the model is not built.
    """
    if not is_built(model):
        raise ModelError(
            "running statistics are known only of a built model. Build it or call it once first, or give its first "
            "layer an Input."
        )
    return model_variables(model)


def running_statistics(model: Any) -> list[Any]:
    """Return the variables that the forward pass writes, except random seeds. Raises like `statistics_variables`."""
    return [native_variable(variable) for variable in statistics_variables(model).pass_updated_variables.values()]


def count_non_finite(gradient: Any) -> Any:
    """Return the number of inf and NaN elements of a gradient, int32 scalar."""
    return tf.reduce_sum(tf.cast(tf.logical_not(tf.math.is_finite(gradient)), tf.int32))


@contextlib.contextmanager
def keep_statistics(
    model: Any, starts: AccumulationStartValues, micro_step: Any, was_skipped: Callable[[], Any]
) -> Iterator[None]:
    """Implementation of `LossScaleOptimizer.keep_statistics`.

    Args:
        model: a built Keras model or layer.
        starts: values of the variables at the start of the accumulation.
        micro_step: calls since then; None without accumulation.
        was_skipped: returns whether the update of this block was skipped, boolean scalar.
    """
    variables = statistics_variables(model)
    running = [native_variable(variable) for variable in variables.pass_updated_variables.values()]
    before = [tf.identity(variable) for variable in running]
    seen = ForwardPassStatistics(running, *starts.watch(model, variables, micro_step))
    if micro_step is not None:
        before = starts.kept(model, before, micro_step)
    token = CURRENT_STATISTICS.set(seen)
    try:
        yield
    except BaseException:
        if tf.executing_eagerly() and not tf.distribute.has_strategy():
            seen.end_pass()
            assign_values([*running, *seen.written], [*before, *seen.before])
        raise
    finally:
        CURRENT_STATISTICS.reset(token)
    seen.end_pass()
    left = [*running, *seen.written]

    def decide(_: replicas.ReplicaRun, before: Sequence[Any], means: Sequence[Any]) -> None:
        keep = functools.partial(assign_values, running[: len(means)], means)
        tf.cond(was_skipped(), lambda: assign_values(left, before), keep)

    if left:
        replicas.merge_replica_calls(decide, [*before, *seen.before], seen.means or [])

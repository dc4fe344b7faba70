"""Running statistics of a model in a loop: means over the replicas, and restoration after a skipped update (S12).

None of it is saved.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final

import tensorflow as tf

from polyamp.errors import UnsupportedError
from polyamp_keras.arrays import native_variable
from polyamp_keras.models.variables import ModelVariables, statistics_variables
from polyamp_keras.precision.layer_dtypes import variable_compute_dtypes
from polyamp_tensorflow.arrays import assign_values
from polyamp_tensorflow.distributed import replicas
from polyamp_tensorflow.distributed.all_reduce import all_reduce_sum
from polyamp_tensorflow.step.parameter_writes import WRITE_PREFIX, EagerReader, ForwardWriteTracker

_STATISTICS: Final = ""
"""Group of `StartValues` with all running statistics of a model; each written parameter is a group by its name."""


class StartValues:
    """Values of a model's running state at the first micro-batch of an accumulation, in variables.

    If the model was saved during an accumulation, the saved statistics are used.

    Attributes:
        read: reader of the model's parameters in eager steps.
    """

    def __init__(self) -> None:
        self.read = EagerReader()
        self._groups: dict[str, tuple[list[Any], Any]] = {}

    def create(self, group: str, values: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return the variables for these values, and the one that is 1 once they are set; create them if necessary."""
        if group not in self._groups:
            with tf.init_scope():
                made = [tf.Variable(tf.zeros(value.shape, value.dtype), trainable=False) for value in values]
                self._groups[group] = made, tf.Variable(0, trainable=False, name="window_start_known")
        return self._groups[group]

    def keep(self, group: str, values: Sequence[Any], micro_step: Any) -> list[Any]:
        """Return the variables of a group. At the first micro-batch, of an accumulation or ever, they get `values`."""
        variables, known = self.create(group, values)

        def write(_: replicas.ReplicaRun, values: Sequence[Any]) -> None:
            begins = tf.equal(micro_step, 0) | tf.equal(known, 0)
            tf.cond(begins, lambda: assign_values([*variables, known], [*values, 1]), lambda: None)

        replicas.merge_replica_calls(write, values)
        return variables


class ForwardPassStatistics:
    """Variables that one forward pass writes in a `keep_statistics` block. `apply` reduces them with the gradients.

    Args:
        model: a built Keras model or layer.
        starts: its values at the start of the accumulation.
        micro_step: calls since then; None without accumulation.

    Raises:
        ModelError: the model is not built.
    """

    def __init__(self, model: Any, starts: StartValues, micro_step: Any) -> None:
        variables = statistics_variables(model)
        self._running = _native_statistics(variables)
        self._means: list[Any] = []  # over the replicas, from `sum_with_gradients`
        self._written: list[Any] = []
        self._before = [tf.identity(variable) for variable in self._running]
        compute_dtypes = functools.partial(variable_compute_dtypes, model)
        self._writes: ForwardWriteTracker | None = ForwardWriteTracker(variables, starts.read, compute_dtypes)
        self._starts = starts
        self._micro_step = micro_step
        if micro_step is not None:
            self._before = starts.keep(_STATISTICS, self._before, micro_step)

    def end_pass(self, updated: Sequence[Any] | None = None) -> None:
        """End the forward pass: restore the unchanged digits of parameters that it wrote from 16-bit numbers.

        A second call does nothing, since later writes are updates.

        Args:
            updated: the parameters to be updated; others may belong to another optimizer. None for all.

        Raises:
            UnsupportedError: a written parameter on several replicas with accumulation.
        """
        if self._writes is None:
            return
        found = self._writes.find_writes(
            None if updated is None else {id(native_variable(variable)) for variable in updated}
        )
        self._writes = None
        before = [each.before for each in found.values()]
        if self._micro_step is not None:
            _check_single_replica(found)  # no variable can be created while several replicas are traced
            before = [self._starts.keep(n, [each.before], self._micro_step)[0] for n, each in found.items()]
        self._written = [each.variable for each in found.values()]
        self._before = [*self._before, *before]
        for each in found.values():
            if each.narrow:
                each.variable.assign(each.after)

    def sum_with_gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """Sum gradients over the replicas, and average the running statistics in the same reduction."""
        count = tf.distribute.get_replica_context().num_replicas_in_sync
        if count == 1:
            return list(gradients)
        sums = all_reduce_sum([*gradients, *(tf.identity(variable) for variable in self._running)])
        self._means = [total / tf.cast(count, total.dtype) for total in sums[len(gradients) :]]
        return sums[: len(gradients)]

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Context manager around the pass and its `apply`. An error restores the values, unless a graph is traced."""
        token = CURRENT_STATISTICS.set(self)
        try:
            yield
        except BaseException:
            if tf.executing_eagerly() and not tf.distribute.has_strategy():
                self.end_pass()
                assign_values([*self._running, *self._written], self._before)
            raise
        finally:
            CURRENT_STATISTICS.reset(token)
        self.end_pass()

    def settle(self, was_skipped: Callable[[], Any]) -> None:
        """Restore the values if the update was skipped, else assign the means.

        Args:
            was_skipped: returns whether it was, boolean scalar.
        """
        changed = [*self._running, *self._written]

        def write(_: replicas.ReplicaRun, values: tuple[Sequence[Any], Sequence[Any]]) -> None:
            before, means = values
            keep = functools.partial(assign_values, self._running[: len(means)], means)
            tf.cond(was_skipped(), lambda: assign_values(changed, before), keep)

        if changed:
            replicas.merge_replica_calls(write, (self._before, self._means))


CURRENT_STATISTICS: Final[ContextVar[ForwardPassStatistics | None]] = ContextVar("statistics", default=None)
"""Statistics of the active block in this replica; each replica has its own thread."""


def prepare_statistics(model: Any, starts: StartValues | None) -> None:
    """Check that a model is built, and create the variables for its running statistics unless `starts` is None.

    Raises:
        ModelError: the model is not built.
    """
    running = _native_statistics(statistics_variables(model))
    if starts is not None:
        starts.create(_STATISTICS, running)


def _native_statistics(variables: ModelVariables) -> list[Any]:
    return [native_variable(variable) for variable in variables.pass_updated_variables.values()]


def _check_single_replica(found: Mapping[str, Any]) -> None:
    if found and tf.distribute.get_strategy().num_replicas_in_sync > 1:
        raise UnsupportedError(
            f"{next(iter(found)).removeprefix(WRITE_PREFIX)!r} is a parameter that the forward pass writes. With "
            "accumulate_steps on several replicas polyamp cannot take such a write back at the end of a window. "
            "Use accumulate_steps=1, or polyamp.train_step."
        )

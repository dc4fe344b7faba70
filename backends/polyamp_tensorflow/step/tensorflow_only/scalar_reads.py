"""Context manager in which a Keras optimizer's step count and learning rate are read once.

Keras's `update_step` reads both for every parameter, and what it computes from them, such as powers of the betas. In a
graph two reads of a variable are different values, so the graph optimizer cannot merge what depends on them: in Adam
ten operations a parameter, which gives 4 % of the step of eight small layers.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final

import keras
import tensorflow as tf

from polyamp_keras.arrays import native_variable
from polyamp_keras.own_loop.optimizer_checks import optimizer_members

_SCALARS: Final = ("iteration", "learning_rate")
"""Names of the variables that `keras.optimizers.Optimizer` itself makes."""


class ScalarReads(keras.StatelessScope):  # type: ignore[misc]  # Keras is untyped
    """Scope in which the given variables have the values that they had at its start, until they are assigned.

    Unlike in its base class an assignment, to these or any other variable, acts at once.
    """

    def add_update(self, update: Any) -> None:
        """Assign to the variable, as outside the scope. Keras calls it for `assign`."""
        variable, value = update
        self.state_mapping.pop(id(variable), None)  # first: `value` is the tf.Variable again
        native_variable(variable).assign(tf.cast(value, variable.dtype))


def share_scalar_reads(optimizer: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager in which reads of the optimizer's step count and learning rate are shared.

    Classes outside Keras are left as they are: they may write to the `tf.Variable` inside.

    Args:
        optimizer: a built Keras optimizer; members of a `MultiOptimizer` are included.
    """
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:  # Keras merges the replicas into another thread
        return contextlib.nullcontext()
    parts = [part for part in optimizer_members(optimizer) if type(part).__module__.partition(".")[0] == "keras"]
    known = {id(v): v for part in parts for v in part.variables if v.name in _SCALARS}
    return ScalarReads([(scalar, native_variable(scalar).read_value()) for scalar in known.values()])

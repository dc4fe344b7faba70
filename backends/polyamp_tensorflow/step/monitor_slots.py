"""`MonitoredUpdate`: what a step collects for a monitor, in TensorFlow, as graph code (S35)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import tensorflow as tf

from polyamp.monitor.slots import EXPONENT_FIELDS, MonitorSelection, MonitorSlots, add_update_norms, collect_slots


class TensorFlowSlots:
    """`SlotFunctions` for TensorFlow. All replicas have the same gradients and parameters."""

    def exponent_counts(self, name: str, array: Any) -> Any:
        """Return how many elements have each exponent field."""
        bits = tf.bitcast(tf.reshape(tf.cast(_real(array), tf.float32), [-1]), tf.int32)
        fields = tf.bitwise.bitwise_and(tf.bitwise.right_shift(bits, 23), EXPONENT_FIELDS - 1)
        return tf.math.unsorted_segment_sum(tf.ones_like(fields), fields, EXPONENT_FIELDS)  # XLA has no bincount

    def squares(self, name: str, array: Any) -> Any:
        """Return the sum of squares."""
        return tf.reduce_sum(tf.square(tf.cast(_real(array), tf.float32)))

    def stack(self, values: Sequence[Any]) -> Any:
        """Stack tensors."""
        return tf.stack(values)

    def square_root(self, values: Any) -> Any:
        """Return the square root."""
        return tf.sqrt(values)


_FUNCTIONS: Final = TensorFlowSlots()


class MonitoredUpdate:
    """Collects the figures of one update: made before it, finished after it.

    Args:
        selection: what is collected.
        parameters: path -> trainable variable.
        gradients: path -> unscaled gradient, before clipping.
        scale: the scale of this step's loss.
    """

    def __init__(
        self, selection: MonitorSelection, parameters: Mapping[str, Any], gradients: Mapping[str, Any], scale: Any
    ) -> None:
        self._selection = selection
        self._parameters = parameters
        self._old = self._values()
        self._slots = collect_slots(
            selection._replace(updates=False),
            _FUNCTIONS,
            gradients,
            self._old,
            {},
            read=tf.constant(True),
            scale=tf.identity(scale),
            carried=tf.constant(1.0),
        )

    def _values(self) -> dict[str, Any]:
        return {name: tf.identity(_value(variable)) for name, variable in self._parameters.items()}

    def finish(self) -> MonitorSlots:
        """Return the figures, after the update."""
        if not self._selection.updates:
            return self._slots
        return add_update_norms(self._slots, self._selection, _FUNCTIONS, self._old, self._values())


def _value(variable: Any) -> Any:
    """Return a variable's value at this place of the program."""
    return tf.convert_to_tensor(getattr(variable, "value", variable))


def _real(array: Any) -> Any:
    """Return complex numbers as pairs of real ones."""
    return tf.stack([tf.math.real(array), tf.math.imag(array)]) if array.dtype.is_complex else array

"""Private names of TensorFlow that the engine uses (TensorFlow from 2.19)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.eager.record import stop_recording as stop_recording
from tensorflow.python.ops.control_flow_util_v2 import in_while_loop_defun

EagerTensor: Final[Any] = tf.__internal__.EagerTensor
"""Class of tensors that have a value; `tf.Tensor` also covers symbolic tensors of a graph."""


def is_in_while_loop() -> bool:
    """Return whether operations are traced into the body of a `tf.while_loop`, or into a function that it calls."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None and not in_while_loop_defun(graph):
        graph = getattr(graph, "outer_graph", None)
    return graph is not None


@contextlib.contextmanager
def report_operations(report: Callable[[str, Any, Any], None]) -> Iterator[None]:
    """Context manager that calls `report(name, inputs, outputs)` for each operation that this thread runs."""
    from tensorflow.python.framework import op_callbacks

    def callback(name: str, inputs: Any, attributes: Any, outputs: Any, *more: Any, **options: Any) -> None:
        report(name, inputs, outputs)

    op_callbacks.add_op_callback(callback)
    try:
        yield
    finally:
        op_callbacks.remove_op_callback(callback)

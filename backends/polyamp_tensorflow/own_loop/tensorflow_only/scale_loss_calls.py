"""Record of the calls of `scale_loss`, to detect a missing one (S6)."""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from polyamp.errors import LossScaleError
from polyamp_tensorflow.compat import FunctionGraph


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

    def record(self) -> None:
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


def _outer_function_graph(graph: Any) -> Any:
    """Return the graph of the function that contains a graph, which may be a condition's or a loop's body."""
    plain = FunctionGraph
    while isinstance(graph, plain) and type(graph) is not plain and isinstance(graph.outer_graph, plain):
        graph = graph.outer_graph
    return graph

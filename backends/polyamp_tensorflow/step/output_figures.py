"""`watch_outputs`: figures of layers' outputs in the forward passes of a step, for a monitor, as graph code (S35).

They leave a pass beside the loss function's own `aux`, which is stacked over micro-batches and replicas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from polyamp.monitor.slots import MonitorSelection, OutputFigures, OutputLimits, check_selected_outputs, output_limits
from polyamp.results import LossFunction
from polyamp.rules import step_checks
from polyamp_keras.arrays import is_floating
from polyamp_keras.models.layers import LayerEntry, list_layers, recurrent_cells, replace_calls
from polyamp_keras.precision.layer_method_wrappers import copy_signature


def watch_outputs(model: Any, loss_fn: LossFunction, selection: MonitorSelection) -> LossFunction:
    """Return a loss function whose aux is that of `loss_fn` and the figures of the outputs of layers.

    Only calls inside `loss_fn` count: not those of a layer that runs again in the backward pass. Calls inside of a loop
    or a `tf.function` are not seen, nor the cells of recurrent layers.

    Args:
        model: the state's model.
        loss_fn: the user's.
        selection: which layers.

    Raises:
        ArgumentError: when it is called: the selection matches no layer that is called.
    """

    @functools.wraps(loss_fn)
    def watched(bound: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        recorder = _LayerOutputs(selection)
        layers = list_layers(model)
        cells = {id(part.layer) for each in layers for part in recurrent_cells(each.layer)}
        with replace_calls(recorder.wrapped(each) for each in layers if id(each.layer) not in cells):
            loss, aux = step_checks.split_loss_and_aux(loss_fn(bound, batch))
        check_selected_outputs(selection, recorder.seen)
        return loss, {"aux": aux, "figures": dict(recorder.found)}

    return watched


def take_figures(aux: dict[str, Any]) -> tuple[Any, dict[str, OutputFigures]]:
    """Return the user's aux, and the figures over all micro-batches and replicas, whose leading axes are summed."""
    figures = {
        path: OutputFigures(
            tf.reduce_sum(tf.reshape(each.sums, (-1, each.sums.shape[-1])), axis=0), tf.reduce_max(each.largest)
        )
        for path, each in aux["figures"].items()
    }
    return aux["aux"], figures


class _LayerOutputs:
    """The outputs of one pass.

    Attributes:
        seen: paths of the layers that were called.
        found: path -> figures of the selected ones.
    """

    def __init__(self, selection: MonitorSelection) -> None:
        self._selection = selection
        self._limits = output_limits(selection.compute)
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self.seen: dict[str, None] = {}
        self.found: dict[str, OutputFigures] = {}

    def wrapped(self, entry: LayerEntry) -> tuple[Any, Callable[..., Any]]:
        """Return a layer and its `call`, which records what it returns."""
        call = entry.layer.call

        def called(*args: Any, **kwargs: Any) -> Any:
            output = call(*args, **kwargs)
            for array in keras.tree.flatten(output):
                if tf.is_tensor(array) and is_floating(array) and self._is_outside(array):
                    self._add(entry.stable_path, tf.stop_gradient(array))
            return output

        return entry.layer, copy_signature(call, called)

    def _is_outside(self, array: Any) -> bool:
        """Return whether an array belongs to the step itself, and not to an inner graph."""
        return self._graph is None or getattr(array, "graph", None) is self._graph

    def _add(self, path: str, array: Any) -> None:
        self.seen[path] = None
        if self._selection.measures_output_of(path):
            figures, known = _array_figures(array, self._limits), self.found.get(path)
            if known is not None:
                figures = OutputFigures(known.sums + figures.sums, tf.maximum(known.largest, figures.largest))
            self.found[path] = figures


def _array_figures(array: Any, limits: OutputLimits) -> OutputFigures:
    wide = tf.abs(array if array.dtype == tf.float64 else tf.cast(array, tf.float32))

    def count(mask: Any) -> Any:
        return tf.cast(tf.math.count_nonzero(mask, dtype=tf.int32), tf.float32)

    elements, zeros = tf.cast(tf.size(wide), tf.float32), count(tf.equal(wide, 0.0))
    lost, below = count(wide <= limits.zero), count(wide < limits.normal)
    squares = tf.cast(tf.reduce_sum(tf.square(wide)), tf.float32)
    sums = tf.stack([elements, zeros, lost - zeros, below - lost, elements - count(wide < limits.overflow), squares])
    largest = tf.cast(tf.reduce_max(wide), tf.float32)
    return OutputFigures(sums, tf.where(tf.math.is_nan(largest), float("inf"), largest))

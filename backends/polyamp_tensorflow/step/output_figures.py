"""`watch_pass`: figures of a step's passes for a monitor, as graph code (S35): of layers' outputs, and of products in 8
bits.

They leave a pass beside the loss function's own `aux`, which is stacked over micro-batches and replicas.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from polyamp.monitor.slots import (
    MonitorSelection,
    MonitorSlots,
    OutputFigures,
    OutputLimits,
    check_selected_outputs,
    output_limits,
)
from polyamp.results import LossFunction
from polyamp.rules import step_checks
from polyamp_keras.arrays import is_floating
from polyamp_keras.models.layers import LayerEntry, list_layers, recurrent_cells, replace_calls
from polyamp_keras.precision.float8_products import watch_products
from polyamp_keras.precision.layer_method_wrappers import copy_signature


def watch_pass(model: Any, loss_fn: LossFunction, selection: MonitorSelection) -> LossFunction:
    """Return a loss function whose aux is that of `loss_fn` and the figures of the outputs of layers, and what takes
    those of products.

    Only calls inside `loss_fn` count: not those of a layer that runs again in the backward pass. Calls inside of a loop
    or a `tf.function` are not seen, nor the cells of recurrent layers.

    Args:
        model: the state's model.
        loss_fn: the user's.
        selection: what is measured.

    Raises:
        ArgumentError: when it is called: the selection matches no layer that is called.
    """

    @functools.wraps(loss_fn)
    def watched(bound: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        recorder = _LayerOutputs(selection) if selection.activations else None
        products = ProductRecorder()
        layers = list_layers(model)
        cells = {id(part.layer) for each in layers for part in recurrent_cells(each.layer)}
        seen = [each for each in layers if id(each.layer) not in cells]
        with contextlib.ExitStack() as blocks:
            if selection.products:
                blocks.enter_context(replace_calls(products.wrapped(each) for each in seen))
            if recorder is not None:
                blocks.enter_context(replace_calls(recorder.wrapped(each) for each in seen))
            loss, aux = step_checks.split_loss_and_aux(loss_fn(bound, batch))
        if recorder is not None:
            check_selected_outputs(selection, recorder.seen)
        figures = {} if recorder is None else recorder.found
        return loss, {"aux": aux, "figures": dict(figures), "products": products}

    return watched


def with_products(aux: Any) -> Any:
    """Return the aux of a pass after its backward pass: of `watch_pass`, with the figures of products."""
    if isinstance(aux, dict) and isinstance(products := aux.get("products"), ProductRecorder):
        return {**aux, "products": dict(products.found)}
    return aux


def with_figures(slots: MonitorSlots, aux: dict[str, Any], selection: MonitorSelection) -> tuple[MonitorSlots, Any]:
    """Return a step's slots with the figures over all micro-batches and replicas, whose leading axes are summed, and
    the user's aux."""
    figures = {
        path: OutputFigures(
            tf.reduce_sum(tf.reshape(each.sums, (-1, each.sums.shape[-1])), axis=0), tf.reduce_max(each.largest)
        )
        for path, each in aux["figures"].items()
    }
    products = {path: tf.reduce_sum(tf.reshape(sums, (-1, 3, 4)), axis=0) for path, sums in aux["products"].items()}
    slots = slots._replace(
        activations=figures if selection.activations else None, products=products if selection.products else None
    )
    return slots, aux["aux"]


class ProductRecorder:
    """Figures of the products in 8 bits of one pass, which its backward pass computes.

    Attributes:
        found: path of a layer -> the sum of its products' figures, float32, shape (3, 4).
    """

    def __init__(self) -> None:
        self._is_own = _graph_test()
        self.found: dict[str, Any] = {}

    def wrapped(self, entry: LayerEntry) -> tuple[Any, Callable[..., Any]]:
        """Return a layer and its `call`, whose products are recorded."""
        sink = functools.partial(self._add, entry.stable_path)
        return entry.layer, watch_products(entry.layer.call, lambda x, w: sink)

    def _add(self, path: str, sums: Any) -> None:
        if self._is_own(sums):
            known = self.found.get(path)
            self.found[path] = sums if known is None else known + sums


def _graph_test() -> Callable[[Any], bool]:
    """Return a function that tells whether an array belongs to the step itself, and not to an inner graph."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    return lambda array: graph is None or getattr(array, "graph", None) is graph


class _LayerOutputs:
    """The outputs of one pass.

    Attributes:
        seen: paths of the layers that were called.
        found: path -> figures of the selected ones.
    """

    def __init__(self, selection: MonitorSelection) -> None:
        self._selection = selection
        self._limits = output_limits(selection.compute)
        self._is_own = _graph_test()
        self.seen: dict[str, None] = {}
        self.found: dict[str, OutputFigures] = {}

    def wrapped(self, entry: LayerEntry) -> tuple[Any, Callable[..., Any]]:
        """Return a layer and its `call`, which records what it returns."""
        call = entry.layer.call

        def called(*args: Any, **kwargs: Any) -> Any:
            output = call(*args, **kwargs)
            for array in keras.tree.flatten(output):
                if tf.is_tensor(array) and is_floating(array) and self._is_own(array):
                    self._add(entry.stable_path, tf.stop_gradient(array))
            return output

        return entry.layer, copy_signature(call, called)

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

"""The graph of a pass with the layer of each operation, and `record_backward`: the operations of its backward pass.

In a graph TensorFlow names an operation of the tape after the scope of the forward operation whose gradient it is. A
scope per layer therefore says which layer it belongs to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import tensorflow as tf

from polyamp.results import LossFunction
from polyamp_keras.models.layers import LayerEntry, list_layers, recurrent_cells, replace_calls
from polyamp_keras.porting.inventory import read_keras_model
from polyamp_keras.precision.layer_method_wrappers import copy_signature, late_call
from polyamp_tensorflow.arrays import to_tensors
from polyamp_tensorflow.compat import callee_graph
from polyamp_tensorflow.observe.op_dtypes import OpDtypeRecorder
from polyamp_tensorflow.step.accumulation import accumulate_gradients

_TAPE: Final = "gradient_tape/"
_LAYER: Final = re.compile(r"polyamp\.layer(\d+)(?=/|_)")
_OTHER_REPLICA: Final = re.compile(r"(^|/)replica_\d+/")


class TracedPass(NamedTuple):
    """Graph of a pass. Attributes: the `tf.function` without arguments, and the paths of its layers in order."""

    function: Any
    paths: Sequence[str]


class GraphOperation(NamedTuple):
    """Operation in the graph of a pass. Attributes: TensorFlow's, the path of its layer, and its pass."""

    operation: Any
    path: str
    is_backward: bool


def trace_pass(state: Any, loss_fn: LossFunction, batch: Any, *, jit_compile: bool = False) -> TracedPass:
    """Trace a forward and backward pass, of which each layer has a scope.

    Args:
        state: a state whose model is built.
        loss_fn: the loss.
        batch: the batch.
        jit_compile: whether XLA compiles the function.
    """
    paths: list[str] = []
    named = read_keras_model(state.model).paths

    def scoped(module: LayerEntry) -> tuple[Any, Callable[..., Any]]:
        scope, call = f"polyamp.layer{len(paths)}/", late_call(module.layer)
        paths.append(named.get(id(module.layer), module.stable_path))

        def called(*args: Any, **kwargs: Any) -> Any:
            with tf.name_scope(scope):
                return call(*args, **kwargs)

        return module.layer, copy_signature(call, called)

    tensors = to_tensors(batch, state.recipe.policy.param)
    layers = list_layers(state.model)
    cells = {id(cell.layer) for each in layers for cell in recurrent_cells(each.layer)}
    with replace_calls(scoped(each) for each in layers if id(each.layer) not in cells):
        function = tf.function(
            lambda: [found.values for found in accumulate_gradients([state], loss_fn, tensors, 1)[2]],
            autograph=False,
            jit_compile=jit_compile or None,
        )
        function.get_concrete_function()
    return TracedPass(function, paths)


def graph_operations(traced: TracedPass) -> Iterator[GraphOperation]:
    """Yield the operations of the first replica, those in the bodies of loops and branches included."""
    yield from _operations(traced.function.get_concrete_function().graph, traced.paths, is_backward=False)


def record_backward(state: Any, loss_fn: LossFunction, batch: Any, recorder: OpDtypeRecorder) -> None:
    """Trace a pass, and record the operations of its backward pass, those of the first replica.

    The body of a loop counts once. A sum of several gradients of one array has no layer, and is left out.

    Args:
        state: a state whose model is built.
        loss_fn: the loss.
        batch: the batch.
        recorder: receives the operations.
    """
    for operation, path, is_backward in graph_operations(trace_pass(state, loss_fn, batch)):
        if is_backward:
            recorder.add_backward(path, operation.type, operation.inputs, operation.outputs)


def _operations(graph: Any, paths: Sequence[str], *, is_backward: bool) -> Iterator[GraphOperation]:
    for operation in graph.get_operations():
        name = operation.name
        backward = is_backward or name.startswith(_TAPE) or f"/{_TAPE}" in name
        called = [each.func.name for each in operation.node_def.attr.values() if each.HasField("func")]
        graphs = [found for each in called if (found := callee_graph(operation, each)) is not None]
        for inner in graphs:
            yield from _operations(inner, paths, is_backward=backward)
        if not graphs and not _OTHER_REPLICA.search(name):
            layers = _LAYER.findall(name)
            yield GraphOperation(operation, paths[int(layers[-1])] if layers else "", backward)

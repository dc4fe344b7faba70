"""Forward and backward pass that reports every layer's output and its cotangent.

The pass is `value_and_grad`, run eagerly instead of as one graph, so that the layers' outputs have values. Casts, loss
scale and training mode are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from polyamp.parity.trace.observer import CaptureCallback, PassRecord
from polyamp.results import LossFunction
from polyamp_tensorflow.arrays import native_variable, to_numpy, to_tensors
from polyamp_tensorflow.compat import LOSS_ATTRIBUTES
from polyamp_tensorflow.models.layers import is_layer, list_layers
from polyamp_tensorflow.observe.op_dtypes import OpDtypeRecorder
from polyamp_tensorflow.observe.tensorflow_only.float64_model import explain_float64_errors
from polyamp_tensorflow.observe.tensorflow_only.global_random_state import GlobalRandomState
from polyamp_tensorflow.observe.tensorflow_only.output_probes import OutputProbes, host_array
from polyamp_tensorflow.observe.tensorflow_only.replica_outputs import ReplicaOutputs, rows_per_replica
from polyamp_tensorflow.porting.fill import assign
from polyamp_tensorflow.porting.inventory import KerasInventory, read_keras_model
from polyamp_tensorflow.step.distributed_step import has_several_replicas
from polyamp_tensorflow.step.step import build_models

Array = np.ndarray[Any, Any]


def capture_pass(state: Any, loss_fn: LossFunction, batch: Any, on_capture: CaptureCallback) -> PassRecord:
    """Run `value_and_grad(loss_fn, compile=False)` on the state, as in `Observer.capture_pass`.

    A `tf.function` of the user runs as Python. An output is the result of a layer's `call`, before a policy rounds it
    for the layers that follow; of a tuple or a dict, the first array. It passes through an identity operation, whose
    gradient is the cotangent. Keras's losses skip a softmax or sigmoid and use its logits, so that such an output has
    no cotangent.

    Operations run one by one: where the graph optimizer or XLA would fuse them, results are rounded in between. On
    several replicas an output is concatenated along the batch, once every replica has reported its part.

    Operations are recorded only for a state that no step has updated, and on the first replica.

    Raises:
        UnsupportedError: the state is in float64, and the model or `loss_fn` combines it with other dtypes.
    """
    build_models([state], loss_fn, to_tensors(batch, state.recipe.policy.param))
    model, holds = state.model, read_keras_model(state.model)
    scale = float(state.scale_state.scale) if state.recipe.loss_scaler.scales else 1.0
    replicas = len(state.strategy.extended.worker_devices) if has_several_replicas(state.strategy) else 1
    parts = ReplicaOutputs(on_capture, replicas, rows_per_replica(batch, replicas))
    operations = OpDtypeRecorder(wanted=int(state.step) == 0)
    probes = OutputProbes(parts.on_capture, scale, operations)
    with _preserve_state(state), _run_eagerly(), probes.inside(model, holds.paths), explain_float64_errors(state):
        run = state.backend.value_and_grad(probes.wrap_loss(loss_fn, model), compile=False)
        result, (gradients,) = run([state], batch)
    parts.finish()
    loss = result[0] if isinstance(result, tuple) else result
    hidden_reason = (
        "" if is_layer(model) else f"{type(model).__qualname__} is no Keras layer, so its parts are not seen."
    )
    return PassRecord(float(loss), _gradients_by_leaf(state, holds, gradients.values), operations.rows(), hidden_reason)


def _gradients_by_leaf(state: Any, holds: KerasInventory, gradients: Mapping[str, Any]) -> dict[str, Array | None]:
    """Return the gradients of the state's parameters by their names in the inventory."""
    names = {id(native_variable(variable)): name for name, variable in state.variables.parameters.items()}
    leaves = [leaf for layer in holds.inventory.layers for leaf in layer.leaves.values()]
    found = {}
    for leaf in leaves:
        name = names.get(id(native_variable(holds.variables[leaf.name])))
        if name is not None and leaf.tied is None:
            value = gradients[name]
            found[leaf.name] = None if value is None else host_array(value)
    return found


@contextlib.contextmanager
def _preserve_state(state: Any) -> Iterator[None]:
    """Context manager that restores random streams, statistics and added losses on exit."""
    written = {**state.variables.rng, **state.variables.pass_updated_variables}
    values = [(variable, to_numpy(variable)) for variable in written.values()]
    layers = [module.layer for module in list_layers(state.model)]
    losses = [(vars(layer)[name], list(vars(layer)[name])) for layer in layers for name in LOSS_ATTRIBUTES]
    streams = GlobalRandomState()
    try:
        yield
    finally:
        for variable, value in values:
            assign(variable, value)
        for listed, items in losses:
            listed[:] = items
        streams.restore()


@contextlib.contextmanager
def _run_eagerly() -> Iterator[None]:
    """Context manager that runs every `tf.function` as Python, so that layers inside it have values."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)

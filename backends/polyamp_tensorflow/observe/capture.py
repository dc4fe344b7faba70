"""Forward and backward pass that reports every layer's output and its cotangent.

The pass is `value_and_grad`, run eagerly instead of as one graph, so that the layers' outputs have values. Casts, loss
scale and training mode are the same. `OutputProbes` are identity operations on the layers' outputs.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from polyamp.errors import PolyampError, UnsupportedError
from polyamp.parity.trace.observer import CaptureCallback, CaptureKind, PassRecord
from polyamp.results import LossFunction
from polyamp_keras.arrays import dtype_name, is_floating, native_variable
from polyamp_keras.compat import LOSS_ATTRIBUTES
from polyamp_keras.engines.tensorflow import to_dense
from polyamp_keras.engines.tensorflow_compat import EagerTensor
from polyamp_keras.models.layers import LayerEntry, is_layer, list_layers, recurrent_cells, replace_calls
from polyamp_keras.porting.fill import assign
from polyamp_keras.porting.inventory import KerasInventory, read_keras_model
from polyamp_keras.precision.layer_method_wrappers import copy_signature
from polyamp_tensorflow.arrays import to_numpy, to_tensors
from polyamp_tensorflow.distributed.replicas import has_several_replicas
from polyamp_tensorflow.observe.model_copy import GlobalRandomState
from polyamp_tensorflow.observe.op_dtypes import OpDtypeRecorder
from polyamp_tensorflow.observe.tensorflow_only.replica_outputs import ReplicaOutputs, current_replica, rows_per_replica
from polyamp_tensorflow.precision.policy_module import PolicyModule
from polyamp_tensorflow.step.step import build_models

Array = np.ndarray[Any, Any]


def capture_pass(
    state: Any,
    loss_fn: LossFunction,
    batch: Any,
    on_capture: CaptureCallback,
    operations: OpDtypeRecorder | None = None,
) -> PassRecord:
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
    operations = OpDtypeRecorder(enabled=int(state.step) == 0) if operations is None else operations
    probes = OutputProbes(parts.on_capture, scale, operations)
    with _preserve_state(state), run_eagerly(), probes.install(model, holds.paths), _explain_float64_errors(state):
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
def run_eagerly() -> Iterator[None]:
    """Context manager that runs every `tf.function` as Python, so that layers inside it have values."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


@contextlib.contextmanager
def _explain_float64_errors(state: Any) -> Iterator[None]:
    """Context manager that explains errors of operations in float64.

    Raises:
        UnsupportedError: TensorFlow or Keras refuses an operation while the state is in float64.
    """
    try:
        yield
    except PolyampError:
        raise
    except (tf.errors.OpError, TypeError, ValueError) as error:
        if state.plan.compute != "float64":
            raise
        raise UnsupportedError(
            f"Keras: in float64 the model or loss_fn fails ({type(error).__name__}: {str(error).splitlines()[0]}), as "
            "where it mixes numbers of its own in float32 with the layers' outputs."
        ) from error


class ReplicaCallback(Protocol):
    """Callback for the inputs, outputs and cotangents of a replica's layers."""

    def __call__(self, replica: int, path: str, what: CaptureKind, array: Array, dtype: str) -> None: ...


class OutputProbes:
    """Probes on the layers' outputs during one pass.

    Args:
        on_capture: called with the arrays.
        scale: the loss scale, by which cotangents are divided.
        operations: records the operations by layer.
    """

    def __init__(self, on_capture: ReplicaCallback, scale: float, operations: OpDtypeRecorder) -> None:
        self._see, self._scale, self._operations = on_capture, scale, operations
        self._calls: Counter[tuple[int, str]] = Counter()
        self._forward: set[int] = set()  # the replicas that are in loss_fn

    def install(self, model: Any, paths: Mapping[int, str]) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that adds a probe to the `call` of every layer of a model. `paths` are by layer id.

        Cells of a recurrent layer get no probe (`recurrent_cells`).
        """
        found = list_layers(model)
        cells = {id(part.layer) for each in found for part in recurrent_cells(each.layer)}
        shown = [each for each in found if id(each.layer) not in cells]
        holders = {id(each.parent) for each in shown}

        def probe(module: LayerEntry) -> tuple[Any, Callable[..., Any]]:
            layer, path = module.layer, paths.get(id(module.layer), module.stable_path)
            return layer, self._wrap_call(self._operations.wrap_call(layer, path), path, takes=id(layer) not in holders)

        return replace_calls(map(probe, shown))

    def wrap_loss(self, loss_fn: LossFunction, model: Any) -> LossFunction:
        """Return `loss_fn` wrapped to mark the forward pass. A model that is not a layer gets its probe here."""

        def watched(bound: Any, batch: Any) -> Any:
            number, _ = current_replica()
            self._forward.add(number)
            try:
                with contextlib.nullcontext() if number else self._operations.record_ops():
                    return loss_fn(bound if is_layer(model) else _PolicyModuleProbe(bound, self._insert_probe), batch)
            finally:
                self._forward.discard(number)

        return watched

    def _wrap_call(self, call: Callable[..., Any], path: str, *, takes: bool) -> Callable[..., Any]:
        """Return a layer's `call` with a probe on its output. Its input is reported if `takes` is True."""

        def called(*args: Any, **kwargs: Any) -> Any:
            return self._insert_probe(path, call(*args, **kwargs), args if takes else ())

        return copy_signature(call, called)

    def _insert_probe(self, path: str, output: Any, inputs: Any = ()) -> Any:
        """Return the output with a probe on its first array, after reporting the first array of the inputs.

        A layer that Keras recomputes in the backward pass (`remat`) is reported once: its output from the forward pass,
        and the cotangent from the recomputation.
        """
        leaves = keras.tree.flatten(output)
        place = _first_floating(leaves)
        if place is None:
            return output
        number, _ = current_replica()
        name = path
        if number in self._forward:
            self._calls[number, path] += 1
            count = self._calls[number, path]
            name = path if count == 1 else f"{path}#{count}"
            taken = keras.tree.flatten(inputs)
            first = _first_floating(taken)
            if first is not None:
                self._record_tensor(number, name, "input", taken[first])
            self._record_tensor(number, name, "output", leaves[place])
        elif self._calls[number, path] != 1:
            return output  # the recomputed call cannot be identified
        probed = self._probe(number, name, leaves[place])
        if output is leaves[place]:
            return probed
        leaves[place] = probed
        return keras.tree.pack_sequence_as(output, leaves)

    def _probe(self, number: int, name: str, output: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            if number not in self._forward:  # else it belongs to a gradient that loss_fn itself computes
                self._record_tensor(number, name, "cotangent", to_dense(upstream, output), dtype_name(upstream))
            return upstream

        probed = tf.custom_gradient(lambda tensor: (tensor, gradient))(output)
        vars(probed).update(vars(output))  # Keras stores masks and logits on tensors
        return probed

    def _record_tensor(self, number: int, name: str, what: CaptureKind, tensor: Any, dtype: str = "") -> None:
        array = host_array(tensor)
        if what == "cotangent" and self._scale != 1.0:
            array = array / array.dtype.type(self._scale)
        self._see(number, name, what, array, dtype or dtype_name(tensor))


def host_array(tensor: Any) -> Array:
    """Return a tensor as a NumPy array in float32 or float64."""
    array = np.asarray(tensor if tensor.shape.rank else tensor.numpy())  # NumPy cannot convert 16-bit scalars
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def _first_floating(leaves: list[Any]) -> int | None:
    """Return the index of the first floating array that is not a scalar, else of the first scalar; None without one."""
    found = [place for place, leaf in enumerate(leaves) if isinstance(leaf, EagerTensor) and is_floating(leaf)]
    return next((place for place in found if leaves[place].shape.rank), found[0] if found else None)


class _PolicyModuleProbe(PolicyModule):
    """`PolicyModule` of a model that is not a Keras layer, with a probe on its output."""

    def __init__(self, bound: PolicyModule, through: Callable[[str, Any], Any]) -> None:
        vars(self).update(vars(bound))
        self._insert_probe = through

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._insert_probe("", super().__call__(*args, **kwargs))

"""`OutputProbes`: identity operations that report the outputs of a model's layers and their cotangents."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from polyamp.parity.trace.observer import CaptureKind
from polyamp.results import LossFunction
from polyamp_tensorflow.arrays import dtype_name, is_floating, to_dense
from polyamp_tensorflow.compat import EagerTensor
from polyamp_tensorflow.models.layers import LayerEntry, is_layer, list_layers, replace_calls
from polyamp_tensorflow.observe.op_dtypes import OpDtypeRecorder
from polyamp_tensorflow.observe.tensorflow_only.replica_outputs import current_replica
from polyamp_tensorflow.precision.policy_module import PolicyModule
from polyamp_tensorflow.precision.tensorflow_only.layer_method_wrappers import copy_signature

Array = np.ndarray[Any, Any]


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

    def inside(self, model: Any, paths: Mapping[int, str]) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that adds a probe to the `call` of every layer of a model. `paths` are by layer id.

        Cells of a recurrent layer get no probe, since Keras calls them an unspecified number of times.
        """
        found = list_layers(model)
        cells = {id(part.layer) for each in found for part in _cells(each.layer)}
        shown = [each for each in found if id(each.layer) not in cells]
        holders = {id(each.parent) for each in shown}

        def probe(module: LayerEntry) -> tuple[Any, Callable[..., Any]]:
            layer, path = module.layer, paths.get(id(module.layer), module.stable_path)
            return layer, self._wrap_call(self._operations.inside(layer, path), path, takes=id(layer) not in holders)

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


def _cells(layer: Any) -> list[Any]:
    return list_layers(layer.cell) if isinstance(layer, keras.layers.RNN) else []


class _PolicyModuleProbe(PolicyModule):
    """`PolicyModule` of a model that is not a Keras layer, with a probe on its output."""

    def __init__(self, bound: PolicyModule, through: Callable[[str, Any], Any]) -> None:
        vars(self).update(vars(bound))
        self._insert_probe = through

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._insert_probe("", super().__call__(*args, **kwargs))

"""`JaxObserver`: the `polyamp.parity.trace.observer.Observer` protocol for JAX.

`LeafGradients` are the gradients of a pass, by the leaf names of the model's inventory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.parity.trace.observer import CaptureCallback, DropoutCount, PassRecord, UniformSource
from polyamp.parity.trace.operation_log import OperationRecorder
from polyamp.results import LossFunction
from polyamp_jax import compat
from polyamp_jax.arrays import device_name, named_leaves, shape_struct
from polyamp_jax.observe.capture import PassCapture, PassTraceInfo
from polyamp_jax.observe.dropout import disable_dropout
from polyamp_jax.observe.jax_only.library_observer import observer_of
from polyamp_jax.observe.model_copy import model_copy
from polyamp_jax.observe.operation_recorder import record_operations
from polyamp_jax.porting.libraries.porting_library import find_library
from polyamp_jax.porting.libraries.stacked_layers import parse_slice_name
from polyamp_jax.step.error_hints import explain_error
from polyamp_jax.step.state import JaxState

Array = np.ndarray[Any, Any]


class LeafGradients(Mapping[str, "Array | None"]):
    """Mapping from a trainable leaf's name to its gradient on the host; None where the loss does not depend on it.

    Iteration lists the model's arrays. Lookup also accepts one layer of a stack ("blocks/Dense_0/kernel[3]"), a slice.

    Args:
        state: the state.
        values: one gradient or None per parameter leaf.
    """

    def __init__(self, state: JaxState, values: Sequence[Any]) -> None:
        leaves, structure = jax.tree.flatten(state.params)
        shapes = [shape_struct(jnp.shape(leaf), leaf.dtype) for leaf in leaves]
        # in `made` a shape marks a leaf without gradient; in the second tree shapes mark the trained leaves
        made = [shape if value is None else value for value, shape in zip(values, shapes, strict=True)]
        held = _library_arrays(state, jax.tree.unflatten(structure, made))
        trained = _library_arrays(state, jax.tree.unflatten(structure, shapes))
        self._gradients = {name: held[name] for name, leaf in trained.items() if isinstance(leaf, jax.ShapeDtypeStruct)}

    def __getitem__(self, name: str) -> Array | None:
        part = None if name in self._gradients else parse_slice_name(name)
        value = self._gradients[name if part is None else part[0]]
        if isinstance(value, jax.ShapeDtypeStruct):
            return None
        return host_array(value) if part is None else host_array(value)[part[1]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._gradients)

    def __len__(self) -> int:
        return len(self._gradients)


def _named_gradients(state: JaxState, values: Sequence[Any]) -> Mapping[str, Array | None]:
    """Return the gradients of a pass by the leaf names of the model's inventory. Those of Keras are the state's."""
    if not state.setup.adapter.applies_policy:
        return LeafGradients(state, values)
    pairs = zip(named_leaves(state.params), values, strict=True)
    return {name: None if value is None else host_array(value) for name, value in pairs}


def host_array(array: Any) -> Array:
    """Return the array on the host, as float32 unless it is float64."""
    held = np.asarray(array)
    return held if held.dtype in (np.float32, np.float64) else held.astype(np.float32)


def _library_arrays(state: JaxState, params: Any) -> Mapping[str, Any]:
    model = state.setup.adapter.join(params, state.running)
    return find_library(model).arrays(model)


class JaxObserver:
    """Recorder of JAX training passes; implements `Observer`."""

    def __init__(self) -> None:
        self._captures: dict[int, PassCapture] = {}

    def device(self, model: Any) -> str:
        arrays = observer_of(model).arrays(model).values()
        devices = {device for array in arrays if isinstance(array, jax.Array) for device in array.devices()}
        return ", ".join(sorted(map(device_name, devices)))

    @contextlib.contextmanager
    def model_copy(self, model: Any, *, wide: bool = False, inference: bool = False) -> Iterator[Any]:
        with model_copy(model, wide=wide, inference=inference) as made:
            try:
                yield made
            finally:
                self._captures.clear()

    def disable_dropout(
        self, model: Any, draws: UniformSource | None
    ) -> contextlib.AbstractContextManager[DropoutCount]:
        return observer_of(model).disable_model_dropout(model, draws, disable_dropout(draws))

    def without_policies(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which the model has no applied policy of Keras (`apply_policy`, `compile`)."""
        return observer_of(model).without_policies(model)

    def capture_pass(self, state: Any, loss_fn: LossFunction, batch: Any, on_capture: CaptureCallback) -> PassRecord:
        watching = self._captures.setdefault(id(loss_fn), PassCapture(loss_fn))
        try:
            with compat.separate_trace_cache("watch", strictly=False):
                passed = watching(state, batch)
        except Exception as error:
            said = explain_error(error, batch)
            if said is None:
                raise
            raise said from error
        info: PassTraceInfo = passed.trace_info.value
        dtypes = [str(array.dtype) for array in passed.arrays]
        arrays, cotangents = passed.arrays, passed.cotangents
        for number, (path, what) in enumerate(info.captures):
            on_capture(path, what, host_array(arrays[number]), dtypes[number])
            arrays[number] = None  # free each array once it is reported
        for number in reversed(range(len(info.captures))):
            if cotangents[number] is not None:
                on_capture(info.captures[number][0], "cotangent", host_array(cotangents[number]), dtypes[number])
                cotangents[number] = None
        gradients = _named_gradients(state, passed.gradients)
        return PassRecord(float(passed.loss), gradients, info.operations, info.hidden_reason)

    def record_operations(self, state: Any, loss_fn: LossFunction, batch: Any, recorder: OperationRecorder) -> None:
        record_operations(state, loss_fn, batch, recorder)


OBSERVER: Final = JaxObserver()

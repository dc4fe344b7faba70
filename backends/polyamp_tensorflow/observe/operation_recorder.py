"""`record_operations`: the operations of a forward pass with their values, as TensorFlow reports them in an eager pass.

A tensor is known by its identity. All are kept until the record ends, so that no other object gets the same one.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import tensorflow as tf

from polyamp.parity.trace.operation_log import OperationRecorder, running_frame
from polyamp.results import LossFunction
from polyamp.rules import step_checks
from polyamp_keras.arrays import dtype_name
from polyamp_keras.compat import split_names
from polyamp_keras.engines.tensorflow_compat import EagerTensor, report_operations
from polyamp_tensorflow.distributed.replicas import has_several_replicas
from polyamp_tensorflow.observe.capture import capture_pass

_PACKAGES: Final = ("tensorflow", "keras", "tf_keras", "polyamp_tensorflow", "polyamp_keras")
_READS: Final = ("ReadVariableOp",)
"""Operations whose results are what the pass is given."""
_CONSTANTS: Final = split_names("Fill Range LinSpace Const OneHot")
"""Operations on numbers and shapes."""


def record_operations(state: Any, loss_fn: LossFunction, batch: Any, recorder: OperationRecorder) -> None:
    """Run a pass and record its operations (`OperationObserver.record_operations`)."""
    if has_several_replicas(state.strategy):
        return
    values = _TensorValues(recorder)

    def recorded_loss_fn(model: Any, batch: Any) -> Any:
        with report_operations(values.record):
            result = loss_fn(model, batch)
        loss, _ = step_checks.split_loss_and_aux(result)
        if isinstance(loss, EagerTensor):
            recorder.see("", "loss", _host_array(loss))
        return result

    def on_capture(path: str, what: str, array: Any, dtype: str) -> None:
        recorder.see(path, what, array)

    capture_pass(state, recorded_loss_fn, batch, on_capture)


class _TensorValues:
    """Records of the tensors of a pass, by their identity."""

    def __init__(self, recorder: OperationRecorder) -> None:
        self._recorder = recorder
        self._numbers: dict[int, int] = {}
        self._tensors: list[Any] = []

    def record(self, name: str | bytes, inputs: Any, outputs: Any) -> None:
        """Record an operation."""
        if self._recorder.is_closed:
            self._tensors.clear()
            return
        name = name.decode() if isinstance(name, bytes) else name
        results = [tensor for tensor in outputs if _has_numbers(tensor)]
        if name in _READS:
            for tensor in results:
                self._add_given(tensor)
            return
        taken = [] if name in _CONSTANTS else [self._number(each) for each in inputs if _has_numbers(each)]
        numbers = [number for number in taken if number is not None]
        frame = running_frame(_PACKAGES)
        for tensor in results:
            self._remember(tensor, self._recorder.add(name, numbers, _host_array(tensor), dtype_name(tensor), frame))

    def _number(self, tensor: Any) -> int | None:
        """Return the index of the record of a tensor; of a number that no operation made, None."""
        number = self._numbers.get(id(tensor))
        if number is None and tensor.shape.rank:
            return self._add_given(tensor)
        return number

    def _add_given(self, tensor: Any) -> int:
        number = self._recorder.add_given(_host_array(tensor), dtype_name(tensor))
        self._remember(tensor, number)
        return number

    def _remember(self, tensor: Any, number: int) -> None:
        self._numbers[id(tensor)] = number
        self._tensors.append(tensor)


def _has_numbers(tensor: Any) -> bool:
    """Return whether a value is a tensor with elements that are numbers."""
    if not isinstance(tensor, EagerTensor) or 0 in tensor.shape:
        return False
    dtype: tf.DType = tensor.dtype
    return bool(dtype.is_floating or dtype.is_integer or dtype.is_bool or dtype.is_complex)


def _host_array(tensor: Any) -> Any:
    array = tensor.numpy()
    return np.stack([array.real, array.imag]) if np.iscomplexobj(array) else np.asarray(array)

"""`TensorFlowProbe`: the doctor's operations in TensorFlow, in graphs, on CPUs and GPUs (`CapabilityProbe`)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf

from polyamp.doctor.measurements import BASELINE, FORMATS_MEASURED, KnownTrap, Operation
from polyamp.doctor.probe import CapabilityProbe, HostArray, OperationPrograms, ProbeDevice
from polyamp_tensorflow.arrays import device_name
from polyamp_tensorflow.observe.known_traps import TRAPS

_DTYPES: Final[dict[str, Any]] = {name: tf.as_dtype(BASELINE if name == "tf32" else name) for name in FORMATS_MEASURED}


class TensorFlowProbe:
    """`CapabilityProbe` for TensorFlow: graphs without XLA, as training steps are."""

    tf32_switch = "tf.config.experimental.enable_tensor_float_32_execution(True), TensorFlow's default"
    traps: Sequence[KnownTrap] = TRAPS

    def devices(self) -> Sequence[ProbeDevice]:
        found = []
        for device in tf.config.list_physical_devices():
            name, kind = device_name(device.name), device.device_type.lower()
            details = {} if kind == "cpu" else tf.config.experimental.get_device_details(device)
            found.append(ProbeDevice(name, kind, str(details.get("device_name", name))))
        return sorted(found, key=lambda device: device.kind == "cpu")

    def dtypes(self) -> Sequence[str]:
        return tuple(_DTYPES)

    def programs(self, operation: Operation, dtype: str, device: str, inputs: Sequence[HostArray]) -> OperationPrograms:
        function = _FUNCTIONS[operation]

        def gradients(cotangent: Any, *values: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(values)
                result = function(*values)
            return tape.gradient(result, values, cotangent)

        forward, forward_backward = tf.function(function), tf.function(gradients)
        with tf.device(device), _tf32(dtype):
            tensors = [_tensor(_device_order(operation, array), dtype) for array in inputs]
            cotangent = tf.ones_like(function(*tensors))  # eager, whose errors are short
        return OperationPrograms(
            _repeat(lambda: forward(*tensors), dtype, device),
            _repeat(lambda: forward_backward(cotangent, *tensors), dtype, device),
        )

    def product(self, dtype: str, device: str, a: HostArray, b: HostArray) -> HostArray:
        function = tf.function(lambda a, b: tf.cast(tf.matmul(a, b), tf.float32))
        with tf.device(device), _tf32(dtype):
            found: HostArray = function(_tensor(a, dtype), _tensor(b, dtype)).numpy()
        return found


def _attention(query: Any, key: Any, value: Any) -> Any:
    scores = tf.matmul(query, key, transpose_b=True) * tf.cast(1.0 / math.sqrt(query.shape[-1]), query.dtype)
    return tf.matmul(tf.nn.softmax(scores), value)


def _convolution(images: Any, kernels: Any) -> Any:
    return tf.nn.conv2d(images, kernels, 1, "SAME")


_FUNCTIONS: Final[dict[Operation, Callable[..., Any]]] = {
    "matmul": tf.matmul,
    "convolution": _convolution,
    "attention": _attention,
}


def _device_order(operation: Operation, array: HostArray) -> HostArray:
    """Return an input in TensorFlow's order of axes: channels last."""
    if operation == "convolution":
        return array.transpose(0, 2, 3, 1) if array.shape[-1] != 3 else array.transpose(2, 3, 1, 0)
    return array


def _repeat(function: Callable[[], Any], dtype: str, device: str) -> Callable[[int], None]:
    def run(count: int) -> None:
        with tf.device(device), _tf32(dtype):
            for _ in range(count):
                function()
            tf.test.experimental.sync_devices()

    return run


@contextlib.contextmanager
def _tf32(dtype: str) -> Iterator[None]:
    """Turn TF32 on for "tf32" and off for other dtypes, and then back to what it was."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(dtype == "tf32")
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)


def _tensor(array: HostArray, dtype: str) -> Any:
    return tf.cast(tf.constant(np.ascontiguousarray(array)), _DTYPES[dtype])


PROBE: Final[CapabilityProbe] = TensorFlowProbe()

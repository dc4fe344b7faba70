"""TensorFlow operations that a forward pass runs, with their layers and dtypes.

TensorFlow reports each operation as it runs: after all casts, and inside Keras's own functions.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from polyamp.contract.casting_report import OperationCount
from polyamp.float_formats import FLOAT_DTYPES
from polyamp_keras.compat import layer_classes
from polyamp_keras.engines.tensorflow_compat import report_operations
from polyamp_keras.precision.layer_method_wrappers import copy_signature, late_call
from polyamp_keras.precision.op_list import SENSITIVE
from polyamp_tensorflow.precision.op_list import DATA_MOVEMENT, RULE_BY_OPERATION, moves_data


class OpDtypeRecorder:
    """Recorder of the operations in one forward pass.

    Args:
        enabled: False records nothing.

    Attributes:
        casts: (dtype, dtype) -> number of casts between floating dtypes.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.casts: Counter[tuple[str, str]] = Counter()
        self._enabled = enabled
        self._counts: Counter[tuple[str, str, str, str, str]] = Counter()
        self._layers: list[tuple[str, str]] = []
        self._paused = False

    def wrap_call(self, layer: Any, path: str) -> Callable[..., Any]:
        """Return a layer's `call`, wrapped to mark the layer as the running one."""
        call = late_call(layer)
        if not self._enabled:
            return call
        family = "follow" if _has_own_call(layer) else _family(layer)

        def called(*args: Any, **kwargs: Any) -> Any:
            self._layers.append((path, family))
            try:
                return call(*args, **kwargs)
            finally:
                self._layers.pop()

        return copy_signature(call, called)

    @contextlib.contextmanager
    def record_ops(self) -> Iterator[None]:
        """Context manager that records the operations in it."""
        if not self._enabled:
            yield
            return
        with report_operations(self._note):
            yield

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager whose operations are not recorded."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def rows(self) -> list[OperationCount]:
        """Return the recorded operations, in the order in which each first ran."""
        return [OperationCount(*key[:4], count, key[4]) for key, count in self._counts.items()]

    def add_backward(self, layer: str, name: str, inputs: Any, outputs: Any) -> None:
        """Record an operation of a backward pass."""
        dtypes = _floating_dtypes(inputs) or _floating_dtypes(outputs)
        if dtypes and not moves_data(name):
            self._counts[layer, name, ", ".join(dtypes), "follow", "backward"] += 1

    def _note(self, name: str | bytes, inputs: Any, outputs: Any) -> None:
        if self._paused:
            return
        name = name.decode() if isinstance(name, bytes) else name
        if name == "Cast":
            source, target = _floating_dtypes(inputs), _floating_dtypes(outputs)
            if source and target and source != target:
                self.casts[source[0], target[0]] += 1
        if name in DATA_MOVEMENT:
            return
        dtypes = _floating_dtypes(inputs) or _floating_dtypes(outputs)
        if dtypes:
            layer, family = self._layers[-1] if self._layers else ("", "")
            rule = RULE_BY_OPERATION.get(name, "follow")
            found = rule if rule in ("compute", "follow") else family or rule
            self._counts[layer, name, ", ".join(dtypes), found, "forward"] += 1


def _family(layer: Any) -> str:
    """Return the family of a layer that is sensitive as a whole, such as a normalisation with its means and roots."""
    return next((name for name, family in SENSITIVE.items() if isinstance(layer, layer_classes(family.layers))), "")


def _has_own_call(layer: Any) -> bool:
    """Return whether the user wrote a layer's `call`: its operations take the dtype of their operands."""
    module = getattr(type(layer).call, "__module__", None) or ""
    return module.partition(".")[0] not in ("keras", "keras_hub", "tf_keras")


def _floating_dtypes(tensors: Any) -> list[str]:
    return sorted(
        {tensor.dtype.name for tensor in tensors if tf.is_tensor(tensor) and tensor.dtype.name in FLOAT_DTYPES}
    )

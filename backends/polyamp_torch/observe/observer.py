"""torch's `Observer`: copies a model, controls its random numbers and records its modules' outputs.

It is the entry point of this package; `TorchBackend.observer` imports it on the first comparison.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from polyamp.contract.backend import State
from polyamp.parity.trace.observer import CaptureCallback, DropoutCount, Observer, PassRecord, UniformSource
from polyamp.parity.trace.operation_log import OperationRecorder
from polyamp.results import LossFunction
from polyamp_torch.arrays import describe_device
from polyamp_torch.observe import capture, dropout, model_copy, operation_recorder
from polyamp_torch.precision.policy_module import module_device
from polyamp_torch.precision.torch_only.keras_layers import is_keras_layer


class TorchObserver:
    """`Observer` for PyTorch. A model is an `nn.Module`, with or without wrappers, or a Keras model on torch."""

    def device(self, model: Any) -> str:
        return describe_device(module_device(model))

    def model_copy(self, model: Any, *, wide: bool = False, inference: bool = False) -> AbstractContextManager[Any]:
        if is_keras_layer(model):
            from polyamp_torch.observe.torch_only.keras_passes import keras_model_copy

            return keras_model_copy(model, wide=wide, inference=inference)
        return model_copy.model_copy(model, wide=wide, inference=inference)

    def disable_dropout(self, model: Any, draws: UniformSource | None) -> AbstractContextManager[DropoutCount]:
        if is_keras_layer(model):
            from polyamp_torch.observe.torch_only.keras_passes import disable_keras_dropout

            return disable_keras_dropout(model, draws)
        return dropout.disable_dropout(model, draws)

    def without_policies(self, model: Any) -> AbstractContextManager[None]:
        """Return a context manager in which the model has no applied policy of Keras (`apply_policy`, `compile`)."""
        if not is_keras_layer(model):
            return nullcontext()
        from polyamp_torch.observe.torch_only.keras_passes import without_policies

        return without_policies(model)

    def capture_pass(self, state: State, loss_fn: LossFunction, batch: Any, on_capture: CaptureCallback) -> PassRecord:
        return capture.capture_pass(state, loss_fn, batch, on_capture)  # type: ignore[arg-type]  # a state of this backend

    def record_operations(self, state: State, loss_fn: LossFunction, batch: Any, recorder: OperationRecorder) -> None:
        operation_recorder.record_operations(state, loss_fn, batch, recorder)  # type: ignore[arg-type]  # a state of this backend


OBSERVER: Final[Observer] = TorchObserver()

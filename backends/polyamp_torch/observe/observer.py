"""torch's `Observer`: copies a model, controls its random numbers and records its modules' outputs.

It is the entry point of this package; `TorchBackend.observer` imports it on the first comparison.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final

from polyamp.contract.backend import State
from polyamp.parity.trace.observer import CaptureCallback, DropoutCount, Observer, PassRecord, UniformSource
from polyamp.parity.trace.operation_log import OperationRecorder
from polyamp.results import LossFunction
from polyamp_torch.arrays import describe_device
from polyamp_torch.observe import capture, dropout, model_copy, operation_recorder
from polyamp_torch.precision.policy_module import module_device


class TorchObserver:
    """`Observer` for PyTorch. A model is an `nn.Module`, with or without wrappers."""

    def device(self, model: Any) -> str:
        return describe_device(module_device(model))

    def model_copy(self, model: Any, *, wide: bool = False, inference: bool = False) -> AbstractContextManager[Any]:
        return model_copy.model_copy(model, wide=wide, inference=inference)

    def disable_dropout(self, model: Any, draws: UniformSource | None) -> AbstractContextManager[DropoutCount]:
        return dropout.disable_dropout(model, draws)

    def capture_pass(self, state: State, loss_fn: LossFunction, batch: Any, on_capture: CaptureCallback) -> PassRecord:
        return capture.capture_pass(state, loss_fn, batch, on_capture)  # type: ignore[arg-type]  # a state of this backend

    def record_operations(self, state: State, loss_fn: LossFunction, batch: Any, recorder: OperationRecorder) -> None:
        operation_recorder.record_operations(state, loss_fn, batch, recorder)  # type: ignore[arg-type]  # a state of this backend


OBSERVER: Final[Observer] = TorchObserver()

"""`record_operations`: the operations of a forward pass with their values, by a `TorchDispatchMode`.

The mode runs below autograd and autocast, so it sees what a composite function is made of. A tensor is known by its
memory, because autograd may return another Python object for a view. The storages are kept until the record ends, so
that no other tensor gets the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from polyamp.parity.trace.operation_log import OperationRecorder, running_frame
from polyamp.results import LossFunction
from polyamp.rules import step_checks
from polyamp_torch.arrays import dtype_name
from polyamp_torch.compat import DispatchMode, is_compiled, tree_leaves, without_function_modes
from polyamp_torch.observe.capture import capture_pass
from polyamp_torch.observe.torch_only.compiled_module_detection import hidden_modules_reason
from polyamp_torch.step.state import TorchState

_PACKAGES: Final = ("torch", "polyamp_torch", "keras", "polyamp_keras")
_CONSTANTS: Final = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
"""Operations on what `torch.tensor` read from Python numbers."""


def record_operations(state: TorchState, loss_fn: LossFunction, batch: Any, recorder: OperationRecorder) -> None:
    """Run a pass and record its operations (`OperationObserver.record_operations`)."""
    if is_compiled(loss_fn) or hidden_modules_reason(state.model, loss_fn):
        return

    def recorded_loss_fn(model: Any, batch: Any) -> Any:
        with _OperationMode(recorder):
            result = loss_fn(model, batch)
        loss, _ = step_checks.split_loss_and_aux(result)
        if isinstance(loss, torch.Tensor):
            recorder.see("", "loss", loss.detach().to("cpu", torch.float64).numpy())
        return result

    def on_capture(path: str, what: str, array: Any, dtype: str) -> None:
        recorder.see(path, what, array)

    capture_pass(state, recorded_loss_fn, batch, on_capture)


class _OperationMode(DispatchMode):  # type: ignore[misc]  # torch does not annotate it
    """Mode that records operations until the recorder is closed."""

    def __init__(self, recorder: OperationRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._numbers: dict[Any, int] = {}
        self._storages: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record its results."""
        kwargs = kwargs or {}
        if self._recorder.is_closed:
            self._storages.clear()
            return func(*args, **kwargs)
        with without_function_modes():
            inputs = [] if func in _CONSTANTS else [self._number(each) for each in _plain_tensors((args, kwargs))]
            result = func(*args, **kwargs)
            frame = running_frame(_PACKAGES)
            for tensor in _plain_tensors(result):
                number = self._recorder.add(
                    func.overloadpacket.__name__, inputs, _host_array(tensor), dtype_name(tensor.dtype), frame
                )
                self._remember(tensor, number)
        return result

    def _number(self, tensor: torch.Tensor) -> int:
        """Return the index of the record of a tensor; of one that no operation made, a new one."""
        number = self._numbers.get(_memory_key(tensor))
        if number is None:
            number = self._recorder.add_given(_host_array(tensor), dtype_name(tensor.dtype))
            self._remember(tensor, number)
        return number

    def _remember(self, tensor: torch.Tensor, number: int) -> None:
        self._numbers[_memory_key(tensor)] = number
        self._storages.append(tensor.untyped_storage())


def _host_array(tensor: torch.Tensor) -> Any:
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return values.detach().to("cpu", torch.float64).numpy()


def _plain_tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors with elements in memory."""
    for each in tree_leaves(tree):
        if isinstance(each, torch.Tensor) and each.layout == torch.strided and each.numel() and not each.is_meta:
            yield each


def _memory_key(tensor: torch.Tensor) -> Any:
    """Return where a tensor's elements are, which its views of the same elements share."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype

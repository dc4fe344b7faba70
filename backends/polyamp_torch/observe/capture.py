"""Capture of one forward and backward pass: every module's output and the gradient with respect to it.

The pass is that of `value_and_grad`. Forward hooks record outputs, and register a hook on each for its gradient in the
backward pass. Afterwards all hooks are removed and random streams are restored.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from polyamp.parity.trace.observer import CaptureCallback, PassRecord
from polyamp.results import LossFunction
from polyamp.rules import step_checks
from polyamp_torch.arrays import dtype_name, memory_address, output_tensors
from polyamp_torch.compat import (
    NULL_CONTEXT,
    CompiledCallHook,
    compiled_call_of_module,
    is_compiled,
    module_children,
    without_function_modes,
)
from polyamp_torch.observe.op_dtypes import OpDtypeRecorder
from polyamp_torch.observe.torch_only.attribute_snapshot import preserve_attributes
from polyamp_torch.observe.torch_only.compiled_module_detection import compiled_parts, hidden_modules_reason
from polyamp_torch.porting.inventory import short_paths, wrapper_attribute
from polyamp_torch.precision.torch_only.keras_layers import is_keras_layer
from polyamp_torch.step.forward_backward import value_and_grad
from polyamp_torch.step.state import TorchState
from polyamp_torch.step.torch_only.foreign_grads import GraphSizeCache
from polyamp_torch.step.torch_only.random_state import preserve_random_states

Array = np.ndarray[Any, Any]


def capture_pass(state: TorchState, loss_fn: LossFunction, batch: Any, on_capture: CaptureCallback) -> PassRecord:
    """Run and record one pass (`Observer.capture_pass`); operations only of a state that no step has updated."""
    why = hidden_modules_reason(state.model, loss_fn)
    operations = None if why or int(state.step) else OpDtypeRecorder()
    watcher = PassCapture(on_capture, float(state.scale_state.scale) if state.scales else 1.0, operations)
    hooks = watcher.on([] if is_compiled(loss_fn) else hook_targets(state.model))
    if is_keras_layer(state.model):  # its calls run no hooks of torch
        from polyamp_torch.observe.torch_only.keras_passes import watch_keras_model

        hooks = watch_keras_model(state.model, watcher)
    graphs, state.graphs = state.graphs, GraphSizeCache()  # the cache belongs to the state's own loss function
    try:
        with (
            preserve_random_states(state.model, state.device),
            preserve_attributes(state.model),
            hooks,
            operations or NULL_CONTEXT,
        ):
            _, (found,) = value_and_grad(watcher.wrap_loss(loss_fn), [state], batch)
    finally:
        state.graphs = graphs
    gradients = {
        name: None if value is None else _host_array(value, copy=False) for name, value in found.values.items()
    }
    return PassRecord(watcher.loss, gradients, operations.rows if operations else (), why)


class PassCapture:
    """Recorder of one pass.

    Args:
        on_capture: callback for recorded arrays.
        scale: the loss scale, which cotangents are divided by.
        operations: recorder of operations, or None.
    """

    def __init__(self, on_capture: CaptureCallback, scale: float, operations: OpDtypeRecorder | None) -> None:
        self.on_capture = on_capture
        self.scale = scale
        self.operations = operations
        self.running = False
        self.backward = False
        self.loss = float("nan")
        self.calls: dict[str, int] = {}
        self.pending: dict[str, list[tuple[str, bytes]]] = {}
        self.handles: list[Any] = []

    @contextlib.contextmanager
    def on(self, modules: list[tuple[str, nn.Module]]) -> Iterator[None]:
        """Context manager in which the outputs of modules are recorded."""
        try:
            for path, module in modules:
                if compiled_call_of_module(module) is not None:  # its hooks are part of the compiled function
                    self.handles.append(CompiledCallHook(module, partial(self._post_hook(path), module, ())))
                    continue
                if self.operations is not None:
                    self.handles.append(module.register_forward_pre_hook(self._pre_hook(path)))
                self.handles.append(module.register_forward_hook(self._post_hook(path), always_call=True))
            yield
        finally:
            for handle in self.handles:
                handle.remove()

    def wrap_loss(self, loss_fn: LossFunction) -> LossFunction:
        """Return the loss function wrapped to record the loss and the start of the backward pass."""

        def recorded_loss_fn(model: Any, batch: Any) -> Any:
            self._set_running(on=True)
            try:
                result = loss_fn(model, batch)
            finally:
                self._set_running(on=False)
            self.backward = True
            loss, _ = step_checks.split_loss_and_aux(result)
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                self.loss = loss.detach().double().item()
            return result

        return recorded_loss_fn

    def _set_running(self, *, on: bool) -> None:
        self.running = on
        if self.operations is not None:
            self.operations.active = on

    def _pre_hook(self, path: str) -> Callable[..., None]:
        return lambda module, args: self.enter(path)

    def enter(self, path: str) -> None:
        """Record the beginning of a module's call."""
        if self.running and self.operations is not None:
            self.operations.modules.append(path)

    def _post_hook(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling():  # in a compiled function inside of the model
                return
            if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and output is not None:
                output = output[0]
            self.leave(path, None if module_children(module) else args, output)

        return hook

    def leave(self, path: str, args: Any, output: Any) -> None:
        """Record the end of a module's call.

        Args:
            path: of the module.
            args: its positional arguments; None if its inputs are not recorded.
            output: its output; None if the call raised.
        """
        if self.running and self.operations is not None and self.operations.modules:
            self.operations.modules.pop()
        with without_function_modes():
            tensor = None if output is None else _output_tensor(output)
            if tensor is not None and self.running:
                self._record_output(path, tensor, None if args is None else _input_tensor(args, tensor))
            elif tensor is not None and self.backward and path in self.pending:
                self._match_recomputed_call(path, tensor)

    def _record_output(self, path: str, tensor: torch.Tensor, given: torch.Tensor | None) -> None:
        self.calls[path] = number = self.calls.get(path, 0) + 1
        place = path if number == 1 else f"{path}#{number}"
        if given is not None:
            self.on_capture(place, "input", _host_array(given), dtype_name(given.dtype))
        values = _host_array(tensor)
        self.on_capture(place, "output", values, dtype_name(tensor.dtype))
        if tensor.requires_grad:
            self._hook_gradient(place, tensor)
        elif not torch.is_grad_enabled():  # perhaps in a reentrant checkpoint, which recomputes it with gradients
            self.pending.setdefault(path, []).append((place, _array_digest(values)))

    def _match_recomputed_call(self, path: str, tensor: torch.Tensor) -> None:
        """Match a call that a checkpoint recomputes in the backward pass to its first run."""
        if not tensor.requires_grad:
            return
        waiting = self.pending[path]
        known = _array_digest(_host_array(tensor)) if len(waiting) > 1 else None
        number = next((n for n, (_, each) in enumerate(waiting) if each == known), len(waiting) - 1)
        if waiting:
            self._hook_gradient(waiting.pop(number)[0], tensor)

    def _hook_gradient(self, place: str, tensor: torch.Tensor) -> None:
        """Record the gradient with respect to a tensor when it is computed."""

        def hook(gradient: torch.Tensor) -> None:
            if self.backward:  # not in a backward pass of the loss function itself
                values = _host_array(gradient)
                values /= values.dtype.type(self.scale)
                self.on_capture(place, "cotangent", values, dtype_name(gradient.dtype))

        self.handles.append(tensor.register_hook(hook))  # type: ignore[no-untyped-call]  # torch's


def _input_tensor(args: Any, output: torch.Tensor) -> torch.Tensor | None:
    """Return the first floating positional input of a module. None if the output shares its memory: the module may have
    written to it."""
    given = next((each for each in args if isinstance(each, torch.Tensor) and each.is_floating_point()), None)
    if given is None or not given.numel() or given.layout != torch.strided or output.layout != torch.strided:
        return None
    same = memory_address(given) == memory_address(output)
    return None if same else given


def _output_tensor(output: Any) -> torch.Tensor | None:
    """Return the first floating tensor of an output that is not a scalar, else the first floating one, or None. A
    dataclass (transformers' `ModelOutput`) is read in the order of its fields."""
    found = [tensor for tensor in output_tensors(output) if tensor.is_floating_point() and tensor.numel()]
    return next((tensor for tensor in found if tensor.dim()), found[0] if found else None)


def _host_array(tensor: torch.Tensor, *, copy: bool = True) -> Array:
    """Return the values on the host, as float64 for a float64 tensor, else as float32.

    Args:
        tensor: the tensor.
        copy: False if no other code will write to the tensor: the result may then share its memory.
    """
    with without_function_modes():
        dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        values: Array = tensor.detach().to("cpu", dtype, copy=copy).resolve_conj().resolve_neg().numpy()
    return values


def _array_digest(values: Array) -> bytes:
    """Return a digest that distinguishes the results of two calls."""
    return hashlib.blake2b(np.ascontiguousarray(values).tobytes(), digest_size=16).digest()


def hook_targets(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return path and module of the observable modules: the wrapper in place of the wrapped module, and none inside
    compiled parts."""
    short = short_paths(model)
    hidden = [(part.place, part.inside) for part in compiled_parts(model) if part.inside is not None]
    around: set[str] = set()
    found = []
    for place, module in model.named_modules():
        attribute = wrapper_attribute(module)
        if attribute is not None:
            around.add(f"{place}.{attribute}".lstrip("."))
        if place not in around and not any(place != own and place.startswith(inside) for own, inside in hidden):
            found.append((short[place], module))
    return found

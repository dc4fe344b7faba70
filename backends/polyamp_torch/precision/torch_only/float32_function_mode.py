"""Torch function mode that runs the sensitive functions of `op_list` in float32 inside autocast: the islands (S4).

`torch.compile` traces it, and older versions of torch run it in eager code, too. It acts only while autocast is enabled
on its device type, so any region with `enabled=False` suspends it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from polyamp_torch.arrays import HALF_TENSOR_DTYPES
from polyamp_torch.compat import TorchAutocast, open_modes, pop_mode, push_mode
from polyamp_torch.precision.op_list import (
    BACKWARD_FUNCTIONS,
    CUDA_RULE_BY_FUNCTION,
    FUNCTIONS_WITHOUT_DISPATCH,
    RULE_BY_FUNCTION,
    OpRule,
    copy_without_dispatch,
    find_rule,
)
from polyamp_torch.precision.torch_only import activation_checkpointing
from polyamp_torch.precision.torch_only.compat import NO_CPU_LSTM
from polyamp_torch.precision.torch_only.float32_gathers import gather_in_float32, gather_source
from polyamp_torch.precision.torch_only.product_classification import classify_product, is_matrix_product

_AUTOCAST_DTYPES: Final = {*HALF_TENSOR_DTYPES, torch.float32}
"""The dtypes that autocast casts from and to."""
_PLAIN_TYPES: Final = {torch.Tensor, torch.nn.Parameter}
_SEQUENCES: Final = (list, tuple)  # torch 2.7 cannot compile `list | tuple` in isinstance()
_CONTAINERS: Final = (torch.Tensor, *_SEQUENCES)
_RULES_OF_CALLERS: Final = ("enter", "unflatten", "function", "grad_mode")
"""Rules of functions that are not sensitive themselves."""
_FUNCTION_METHODS: Final = ("forward", "setup_context", "vmap", "jvp")
"""The methods of a `torch.autograd.Function` that run in the forward pass."""


class IslandsMode(TorchFunctionMode):
    """Mode that runs the sensitive functions in float32 on tensors of one device type, while autocast is enabled there.

    Args:
        device_type: "cpu", "cuda", ...
        reopen: makes a context manager that opens the islands again, for activation checkpointing.

    Attributes:
        acting: False while a region with torch's own op list is open inside.
        key: identifies the islands of this device type for `carry_into_checkpoint`.
        rules: the rule of each sensitive function.
        closed: whether its block has ended. torch takes a mode off the stack while it handles a function. If it is
            interrupted there, it returns to the stack after its block has ended, and then does nothing.
    """

    def __init__(self, device_type: str, reopen: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self.device_type = device_type
        self.reopen = reopen
        self.acting = True
        self.closed = False
        self.key = ("islands", device_type)
        self.rules = CUDA_RULE_BY_FUNCTION if device_type == "cuda" else RULE_BY_FUNCTION

    def switch(self, acting: bool) -> None:
        """Let the mode act, or not."""
        self.acting = acting

    def open(self) -> None:
        """Let the mode act in this thread."""
        push_mode(self)

    def close(self) -> None:
        """End what `open` began. A second call has no effect."""
        self.closed = True
        remove_mode(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle a call of a torch function; most calls run unchanged."""
        rule = find_rule(func, self.device_type) if is_dynamo_compiling() else self.rules.get(func)
        if rule is not None and not (rule == "matmul" and is_matrix_product(args)):
            return self._apply_rule(rule, func, types, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)

    def _apply_rule(self, rule: OpRule, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if rule in _RULES_OF_CALLERS:
            return self._enter_function(rule, func, types, args, kwargs)
        if not self.acting or not torch.is_autocast_enabled(self.device_type):
            return func(*args, **kwargs)
        if rule in ("matmul", "product"):
            return self._product(func, args, kwargs)
        if rule == "gather":
            narrow = gather_source(func, args, kwargs)
            if narrow is None or narrow.device.type != self.device_type:
                return func(*args, **kwargs)
            self._carry_into_checkpoint()
            return gather_in_float32(func, args, kwargs, narrow)
        if rule == "lstm" and (self.device_type != "cpu" or torch.get_autocast_dtype("cpu") not in NO_CPU_LSTM):
            return func(*args, **kwargs)
        if rule == "statistics" and _has_float32(args, kwargs):
            return func(*args, **kwargs)
        self._carry_into_checkpoint()
        if _has_result_dtype(kwargs):
            return func(*args, **kwargs)
        return self._call_in_float32(func, args, kwargs, autocast=rule not in ("isolate", "lstm"))

    def _product(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an inner product in float32, a multiplication in its operands' dtype, a matrix product under autocast."""
        kind = None if _has_result_dtype(kwargs) else classify_product(func, args, kwargs)
        operands = () if kind is None else _flat_tensors((*args, *kwargs.values()))
        dtypes = {operand.dtype for operand in operands}
        if kind is None or not dtypes <= _AUTOCAST_DTYPES or any(o.device.type != self.device_type for o in operands):
            return func(*args, **kwargs)
        self._carry_into_checkpoint()
        if kind == "sum" or len(dtypes) > 1:
            return self._call_in_float32(func, args, kwargs, autocast=False)
        with TorchAutocast(self.device_type, enabled=False):
            return func(*args, **kwargs)

    def _call_in_float32(self, func: Any, args: Any, kwargs: dict[str, Any], *, autocast: bool) -> Any:
        """Call a function with its 16-bit tensors in float32; with `autocast=False` autocast is off inside."""
        args = [self._widen(value) if isinstance(value, _CONTAINERS) else value for value in args]
        kwargs = {name: self._widen(v) if isinstance(v, _CONTAINERS) else v for name, v in kwargs.items()}
        if autocast:
            return func(*args, **kwargs)
        with TorchAutocast(self.device_type, enabled=False):
            return func(*args, **kwargs)

    def _carry_into_checkpoint(self) -> None:
        if not torch.compiler.is_compiling():
            activation_checkpointing.carry_into_checkpoint(self.key, self.reopen)

    def _enter_function(self, rule: OpRule, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a function that is not sensitive itself, but calls sensitive functions."""
        compiling = torch.compiler.is_compiling()
        if rule == "unflatten":
            return torch.unflatten(*args, **kwargs)
        if rule == "grad_mode" and self.acting and not compiling and args == (False,):
            activation_checkpointing.carry_into_reentrant(self.key, self.reopen)
        if rule == "function" and not compiling:
            return func(self._wrap_autograd_function(args[0]), *args[1:], **kwargs)
        plain = _PLAIN_TYPES.issuperset(types)  # other subclasses may override
        if rule == "enter" and plain and not (compiling and func in BACKWARD_FUNCTIONS):
            body = FUNCTIONS_WITHOUT_DISPATCH[func] if compiling else copy_without_dispatch(func)
            with self:
                return body(*args, **kwargs)
        return func(*args, **kwargs)

    def _widen(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            narrow = value.dtype in HALF_TENSOR_DTYPES and value.device.type == self.device_type
            return value.float() if narrow else value
        if isinstance(value, _SEQUENCES) and value and isinstance(value[0], torch.Tensor):  # an LSTM's weights
            return [self._widen(item) for item in value]
        return value

    def _wrap_autograd_function(self, function: Any) -> Any:
        """Return a custom autograd function like `function` whose methods run under the islands.

        `torch.func` passes the whole function to the mode, which is off the stack while the methods run.
        """

        def wrap(name: str) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return getattr(function, name)(*args, **kwargs)

            return staticmethod(call)

        own = [
            name for name in _FUNCTION_METHODS if getattr(function, name) is not getattr(torch.autograd.Function, name)
        ]
        return type(function.__name__, (function,), {name: wrap(name) for name in own})


def _flat_tensors(values: Any) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, _SEQUENCES) and value and isinstance(value[0], torch.Tensor):  # operands of einsum
            found.extend(value)
    return found


def _has_float32(args: Any, kwargs: dict[str, Any]) -> bool:
    return any(isinstance(v, torch.Tensor) and v.dtype == torch.float32 for v in (*args, *kwargs.values()))


def _has_result_dtype(kwargs: dict[str, Any]) -> bool:
    """Return whether a call specifies `dtype=` or `out=`.

    A positional dtype needs no check: functions that accept one cast to it, and widening first changes no bit.
    """
    return kwargs.get("dtype") is not None or kwargs.get("out") is not None


def remove_mode(mode: TorchFunctionMode) -> None:
    """Remove every occurrence of a mode from the stack of this thread, and keep the others."""
    stack = open_modes()
    if stack and stack[-1] is mode:
        pop_mode()
        stack.pop()
    if mode in stack:
        for _ in stack:
            pop_mode()
        for entry in stack:
            if entry is not mode:
                push_mode(entry)

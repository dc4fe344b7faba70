"""Torch function mode that runs the sensitive functions of `op_list` in float32 inside autocast: the islands (S4).

`Islands` is a `torch.overrides.TorchFunctionMode`. It acts only while autocast is enabled on its device type, so any
region with `enabled=False` suspends it. `AutocastState` captures the state of autocast and its islands, to be restored
elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from polyamp_torch.arrays import HALF_TENSOR_DTYPES
from polyamp_torch.compat import NULL_CONTEXT, TorchAutocast, eager_backward, open_modes, pop_mode, push_mode
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
from polyamp_torch.precision.torch_only.float32_gathers import gather_in_float32, gather_source
from polyamp_torch.precision.torch_only.product_classification import classify_product, is_matrix_product

_DEVICE_TESTS: Final[dict[str, Callable[[], bool]]] = {
    "cpu": lambda: True,
    "cuda": lambda: torch.cuda.is_available(),
    "mps": lambda: torch.backends.mps.is_available(),
    "xpu": lambda: torch.xpu.is_available(),
}
DEVICE_TYPES: Final = tuple(_DEVICE_TESTS)
_AUTOCAST_DTYPES: Final = {*HALF_TENSOR_DTYPES, torch.float32}
"""The dtypes that autocast casts from and to."""
_SEQUENCES: Final = (list, tuple)  # torch 2.7 cannot compile `list | tuple` in isinstance()
_CONTAINERS: Final = (torch.Tensor, *_SEQUENCES)
_RULES_OF_CALLERS: Final = ("enter", "unflatten", "function", "grad_mode")
"""Rules of functions that are not sensitive themselves."""
_FUNCTION_METHODS: Final = ("forward", "setup_context", "vmap", "jvp")
"""The methods of a `torch.autograd.Function` that run in the forward pass."""


class Islands(TorchFunctionMode):
    """Mode that runs the sensitive functions in float32 on tensors of one device type, while autocast is enabled there.

    Attributes:
        device_type: "cpu", "cuda", ...
        acting: False while a region with torch's own op list is open inside.
        key: identifies the islands of this device type for `carry_into_checkpoint`.
        rules: the rule of each sensitive function.
        closed: whether its block has ended. torch takes a mode off the stack while it handles a function. If it is
            interrupted there, it returns to the stack after its block has ended, and then does nothing.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type
        self.acting = True
        self.closed = False
        self.key = ("islands", device_type)
        self.rules = CUDA_RULE_BY_FUNCTION if device_type == "cuda" else RULE_BY_FUNCTION

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
        if rule == "lstm" and (self.device_type != "cpu" or torch.get_autocast_dtype("cpu") != torch.float16):
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
            activation_checkpointing.carry_into_checkpoint(self.key, self._reopen)

    def _enter_function(self, rule: OpRule, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a function that is not sensitive itself, but calls sensitive functions."""
        compiling = torch.compiler.is_compiling()
        if rule == "unflatten":
            return torch.unflatten(*args, **kwargs)
        if rule == "grad_mode" and self.acting and not compiling and args == (False,):
            activation_checkpointing.carry_into_reentrant(self.key, self._reopen)
        if rule == "function" and not compiling:
            return func(self._wrap_autograd_function(args[0]), *args[1:], **kwargs)
        plain = all(kind in (torch.Tensor, torch.nn.Parameter) for kind in types)  # other subclasses may override
        if rule == "enter" and plain and not (compiling and func in BACKWARD_FUNCTIONS):
            # A new copy each time, because libraries replace functions in torch's modules.
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

    def _reopen(self) -> contextlib.AbstractContextManager[None]:
        return islands(self.device_type)


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


def current_islands(device_type: str) -> Islands | None:
    """Return the islands of a device type that are open in this thread, or None."""
    for mode in open_modes():
        if isinstance(mode, Islands) and mode.device_type == device_type and not mode.closed:
            return mode
    return None


@contextlib.contextmanager
def islands(device_type: str, *, acting: bool = True) -> Iterator[None]:
    """Context manager in which the islands of a device type act, or, with `acting=False`, do not."""
    mode = current_islands(device_type)
    if mode is None and acting:
        with Islands(device_type):
            yield
    elif mode is None or mode.acting is acting:
        yield
    else:
        mode.acting = acting
        try:
            yield
        finally:
            mode.acting = not acting


@contextlib.contextmanager
def without_islands() -> Iterator[None]:
    """Context manager around code that computes in float32 by itself: it takes the innermost islands off the stack."""
    stack = () if torch.compiler.is_compiling() else open_modes()
    if not stack or not isinstance(stack[-1], Islands):
        yield
        return
    pop_mode()
    try:
        yield
    finally:
        push_mode(stack[-1])


class DeviceAutocastState(NamedTuple):
    """State of autocast on one device type."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    islands: bool


class AutocastState(NamedTuple):
    """State of autocast in one thread at one moment.

    Attributes:
        regions: the state on each device type of this machine.
        cache: whether torch's weight cache is on.
        has_islands: whether islands act on any device type, so that the region is polyamp's.
    """

    regions: tuple[DeviceAutocastState, ...]
    cache: bool
    has_islands: bool


@functools.cache
def device_types() -> tuple[str, ...]:
    """Return the device types of this machine."""
    return tuple(kind for kind, available in _DEVICE_TESTS.items() if available())


def capture_autocast_state(kinds: tuple[str, ...] | None = None) -> AutocastState:
    """Return the state of the calling thread, on all device types or on `kinds`."""
    regions = []
    for kind in device_types() if kinds is None else kinds:
        mode = current_islands(kind)
        acting = mode is not None and mode.acting
        regions.append(
            DeviceAutocastState(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), acting)
        )
    return AutocastState(tuple(regions), torch.is_autocast_cache_enabled(), any(region.islands for region in regions))


@contextlib.contextmanager
def restore_autocast_state(state: AutocastState) -> Iterator[None]:
    """Context manager that restores a captured state, in any thread."""
    if not state.regions:
        with eager_backward() if state.has_islands else NULL_CONTEXT:
            yield
        return
    first, *others = state.regions
    with (
        TorchAutocast(first.device_type, dtype=first.dtype, enabled=first.enabled, cache_enabled=state.cache),
        islands(first.device_type, acting=first.islands),
        restore_autocast_state(state._replace(regions=tuple(others))),
    ):
        yield

"""Torch function mode that applies a policy's `op_rules` inside autocast regions.

A function with a rule runs with autocast off, on operands that are cast to one dtype: so neither torch's op list nor
the float32 islands act on it. torch.compile traces the mode. A process whose policies have no `op_rules` never opens
one.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from polyamp.errors import UnsupportedError
from polyamp_torch.arrays import HALF_TENSOR_DTYPES
from polyamp_torch.compat import NULL_CONTEXT, TorchAutocast, open_mode_count, open_modes, push_mode
from polyamp_torch.precision.op_list import FUNCTIONS_WITHOUT_DISPATCH, copy_without_dispatch
from polyamp_torch.precision.torch_only import activation_checkpointing
from polyamp_torch.precision.torch_only.float8_products import (
    FLOAT8_RULES,
    find_product,
    is_same_but_float8,
    multiply,
    without_float8,
)
from polyamp_torch.precision.torch_only.float32_function_mode import remove_mode
from polyamp_torch.precision.torch_only.op_rules import (
    ENTER,
    NORMS_WITH_STATISTICS,
    FunctionRules,
    RuleChanges,
    find_change,
    leaves_alone,
    note_met,
    rules_by_function,
)
from polyamp_torch.precision.torch_only.open_blocks import running_override

_AUTOCAST_DTYPES: Final = (*HALF_TENSOR_DTYPES, torch.float32)
"""The dtypes that a rule casts from. A call with float64 operands is left alone, as by autocast."""
_SEQUENCES: Final = (list, tuple)  # torch 2.7 cannot compile `list | tuple` in isinstance()


class _RunningRule(threading.local):
    """The rule of the function that runs in this thread, for `polyamp.explain`; "" if none has one."""

    word = ""


RUNNING_RULE: Final = _RunningRule()


class OpRulesMode(TorchFunctionMode):
    """Mode that applies rules to functions on tensors of one device type, while autocast is enabled there.

    Args:
        device_type: "cpu", "cuda", ...
        changes: the rules of the innermost region; none where that region's policy has none.

    Attributes:
        op_rules: of these, the policy's `op_rules`.
        table: function -> name and rule.
        is_traced: whether a traced function has opened it.
        closed: whether its block has ended; see `float32_function_mode.IslandsMode`.
    """

    table: FunctionRules

    def __init__(self, device_type: str, changes: RuleChanges) -> None:
        super().__init__()
        self.device_type = device_type
        self.closed = False
        self.is_traced = is_dynamo_compiling()
        self.switch(changes)

    def switch(self, changes: RuleChanges) -> None:
        """Apply other rules from now on."""
        self.changes = changes
        self.op_rules = without_float8(changes)
        if not is_dynamo_compiling():
            self.table = rules_by_function(changes)

    def close(self) -> None:
        """End the mode. A second call has no effect."""
        self.closed = True
        remove_mode(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle a call of a torch function; calls of functions without a rule run unchanged."""
        kwargs = kwargs or {}
        if func is torch.Tensor.unflatten:  # torch.compile cannot trace it under a mode
            return torch.unflatten(*args, **kwargs)
        found = find_change(func, self.changes) if is_dynamo_compiling() else self.table.get(func)
        if found is None or not torch.is_autocast_enabled(self.device_type):
            return func(*args, **kwargs)
        name, rule = found
        if rule == ENTER:
            return self._enter_function(func, types, args, kwargs)
        note_met(self.op_rules, name)
        return self._apply_rule(name, rule, func, args, kwargs)

    def _enter_function(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run the body of one of torch's Python functions under the mode, which is off the stack here."""
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):  # other subclasses may override
            return func(*args, **kwargs)
        body = FUNCTIONS_WITHOUT_DISPATCH[func] if torch.compiler.is_compiling() else copy_without_dispatch(func)
        with self:
            return body(*args, **kwargs)

    def _apply_rule(self, name: str, rule: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if rule in FLOAT8_RULES:
            return self._multiply(name, rule, func, args, kwargs)
        operands = _floating_tensors((*args, *kwargs.values()), self.device_type)
        if not operands or any(x.dtype not in _AUTOCAST_DTYPES for x in operands) or leaves_alone(func, args, kwargs):
            return func(*args, **kwargs)
        dtype = self._dtype(rule, operands)
        if dtype is not None:
            args, kwargs = self._cast_operands(name, dtype, args, kwargs)
        if torch.compiler.is_compiling():
            with TorchAutocast(self.device_type, enabled=False):
                return func(*args, **kwargs)
        self._carry_into_checkpoint()
        outer, RUNNING_RULE.word = RUNNING_RULE.word, rule
        try:
            with TorchAutocast(self.device_type, enabled=False):
                return func(*args, **kwargs)
        finally:
            RUNNING_RULE.word = outer

    def _multiply(self, name: str, rule: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a product in 8 bits (S36), or in the compute dtype where the rule does not cover it."""
        product = find_product(name, rule, self.device_type, args, kwargs)
        if product is None:
            return func(*args, **kwargs)
        dtype = torch.get_autocast_dtype(self.device_type)
        if torch.compiler.is_compiling():
            with TorchAutocast(self.device_type, enabled=False):
                return multiply(product, dtype, rule)
        self._carry_into_checkpoint()
        outer, RUNNING_RULE.word = RUNNING_RULE.word, "float8"
        try:
            with TorchAutocast(self.device_type, enabled=False):
                return multiply(product, dtype, rule)
        finally:
            RUNNING_RULE.word = outer

    def _dtype(self, rule: str, operands: list[torch.Tensor]) -> torch.dtype | None:
        """Return the dtype of the operands under a rule; None for the dtypes that they have."""
        if rule == "compute":
            return torch.get_autocast_dtype(self.device_type)
        if rule == "float32":
            return torch.float32
        if rule == "follow":
            return operands[0].dtype
        return _widest_dtype(operands) if rule == "promote" else None

    def _cast_operands(self, name: str, dtype: torch.dtype, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if name in NORMS_WITH_STATISTICS:
            cast = [self._cast(value, dtype) if index == 0 else value for index, value in enumerate(args)]
            return cast, {key: self._cast(v, dtype) if key == "input" else v for key, v in kwargs.items()}
        cast = [self._cast(value, dtype) for value in args]
        return cast, {key: self._cast(value, dtype) for key, value in kwargs.items()}

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, torch.Tensor):
            casts = value.dtype in _AUTOCAST_DTYPES and value.device.type == self.device_type
            return value.to(dtype) if casts else value
        if isinstance(value, _SEQUENCES) and value and isinstance(value[0], torch.Tensor):
            return [self._cast(item, dtype) for item in value]
        return value

    def _carry_into_checkpoint(self) -> None:
        """Apply the same rules where a checkpoint runs the forward pass again."""
        reopen = functools.partial(op_rules_region, self.device_type, self.changes)
        reentrant = not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        key = ("op_rules", self.device_type, self.changes)
        activation_checkpointing.carry_into_checkpoint(key, reopen, everywhere=reentrant)


class OpRulesBlock:
    """Block in which the rules of one region act on a device type. To exit it before it is entered has no effect."""

    def __init__(self, device_type: str, changes: RuleChanges) -> None:
        self.device_type = device_type
        self.changes = changes
        self._mode: OpRulesMode | None = None
        self._outer: RuleChanges | None = None

    def __enter__(self) -> None:
        current = current_rules_mode(self.device_type)
        if current is None:
            if self.changes:
                self._mode = OpRulesMode(self.device_type, self.changes)
                push_mode(self._mode)
        elif current.changes != self.changes:
            self._outer, self._mode = current.changes, current
            current.switch(self.changes)

    def __exit__(self, *_: object) -> None:
        if self._mode is None:
            return
        if self._outer is None:
            self._mode.close()
        else:
            self._mode.switch(self._outer)
        self._mode = None


def op_rules_region(device_type: str, changes: RuleChanges) -> contextlib.AbstractContextManager[None]:
    """Return a context manager in which these rules act on a device type, and no others."""
    if torch.compiler.is_compiling():
        return _traced_rules(device_type, changes)
    return OpRulesBlock(device_type, changes) if changes or open_mode_count() else NULL_CONTEXT


def check_traced_rules(device_type: str, changes: RuleChanges) -> None:
    """Reject a region in a traced function with other rules than a region that was opened around the function: the
    compiler does not see that the mode of that region changes.

    Raises:
        UnsupportedError: there is such a region.
    """
    current = current_rules_mode(device_type)
    if current is not None and not current.is_traced and current.changes not in ((), changes):
        if running_override() is not None and is_same_but_float8(current.changes, changes):
            return  # the products themselves look for the override
        raise UnsupportedError(
            "torch.compile cannot trace a region with other op_rules inside one that was opened around the compiled "
            "function. Open the inner region outside of the function too."
        )


@contextlib.contextmanager
def _traced_rules(device_type: str, changes: RuleChanges) -> Iterator[None]:
    """`OpRulesBlock` for a function that a compiler traces."""
    current = current_rules_mode(device_type)
    if changes and (current is None or not (current.changes or current.is_traced)):
        with OpRulesMode(device_type, changes):
            yield
    elif current is None or current.changes == changes or not _can_switch(current, changes):
        yield
    else:
        outer = current.changes
        current.switch(changes)
        try:
            yield
        finally:
            current.switch(outer)


def _can_switch(current: OpRulesMode, changes: RuleChanges) -> bool:
    return current.is_traced or not (running_override() is not None and is_same_but_float8(current.changes, changes))


def current_rules_mode(device_type: str) -> OpRulesMode | None:
    """Return the innermost mode of a device type that is open in this thread, or None."""
    if not torch.compiler.is_compiling() and not open_mode_count():
        return None
    for mode in reversed(open_modes()):
        if isinstance(mode, OpRulesMode) and mode.device_type == device_type and not mode.closed:
            return mode
    return None


def current_changes(device_type: str) -> RuleChanges:
    """Return the rules that act on a device type in this thread."""
    current = current_rules_mode(device_type)
    return () if current is None else current.changes


def _floating_tensors(values: Any, device_type: str) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.is_floating_point() and value.device.type == device_type:
                found.append(value)
        elif isinstance(value, _SEQUENCES) and value and isinstance(value[0], torch.Tensor):  # cat, einsum, an LSTM
            found.extend(_floating_tensors(value, device_type))
    return found


def _widest_dtype(operands: list[torch.Tensor]) -> torch.dtype:
    """Return the widest dtype; tensors without axes do not widen arrays, as in torch's promotion."""
    arrays = [x for x in operands if x.dim()] or operands
    widest = arrays[0].dtype
    for x in arrays:
        widest = torch.promote_types(widest, x.dtype)
    return widest

"""Float32 islands: inside autocast, the sensitive functions of `op_list` run in float32 (S4).

In eager code they are kernels of torch's dispatcher (`float32_kernels`). A compiler traces a function mode
(`float32_function_mode`), and where the dispatcher cannot be had the mode serves eager code as well. `AutocastState`
captures the state of autocast and its islands, to be restored elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import torch

from polyamp_torch.compat import (
    EAGER_BACKWARD,
    NULL_CONTEXT,
    TorchAutocast,
    backward_pass_setting,
    open_modes,
    pop_mode,
    push_mode,
)
from polyamp_torch.precision.torch_only.compat import uses_kernels
from polyamp_torch.precision.torch_only.float32_function_mode import IslandsMode, remove_mode
from polyamp_torch.precision.torch_only.float32_kernels import KERNEL_ISLANDS, KernelIslands, KernelsOff
from polyamp_torch.precision.torch_only.op_rules import RuleChanges
from polyamp_torch.precision.torch_only.op_rules_mode import OpRulesMode, current_changes, op_rules_region

_DEVICE_TESTS: Final[dict[str, Callable[[], bool]]] = {
    "cpu": lambda: True,
    "cuda": lambda: torch.cuda.is_available(),
    "mps": lambda: torch.backends.mps.is_available(),
    "xpu": lambda: torch.xpu.is_available(),
}
DEVICE_TYPES: Final = tuple(_DEVICE_TESTS)

Islands = KernelIslands | IslandsMode
"""The islands of one device type in one thread."""


def make_islands(device_type: str) -> Islands:
    """Return islands of a device type that are not open yet."""
    kind = IslandsMode if torch.compiler.is_compiling() or not uses_kernels() else KernelIslands
    return kind(device_type, functools.partial(islands, device_type))


def current_islands(device_type: str) -> Islands | None:
    """Return the islands of a device type that are open in this thread, or None."""
    if not torch.compiler.is_compiling() and (found := KERNEL_ISLANDS.by_device.get(device_type)) is not None:
        return found
    for mode in open_modes():
        if isinstance(mode, IslandsMode) and mode.device_type == device_type and not mode.closed:
            return mode
    return None


@contextlib.contextmanager
def islands(device_type: str, *, acting: bool = True) -> Iterator[None]:
    """Context manager in which the islands of a device type act, or, with `acting=False`, do not."""
    current = current_islands(device_type)
    if current is None and acting:
        with _open(device_type):
            yield
    elif current is None or current.acting is acting:
        yield
    else:
        current.switch(acting)
        try:
            yield
        finally:
            current.switch(not acting)


@contextlib.contextmanager
def _open(device_type: str) -> Iterator[None]:
    opened = make_islands(device_type)
    if isinstance(opened, IslandsMode):
        with opened:
            yield
        return
    try:
        opened.open()
        yield
    finally:
        opened.close()


def backward_islands(device_type: str) -> contextlib.AbstractContextManager[None]:
    """Return a context manager for a backward pass: regions that its hooks and custom functions open have islands.

    They are a mode, which sees what Python calls. Kernels would run for every formula of autograd, too.
    """
    if current_islands(device_type) is not None:
        return NULL_CONTEXT
    return _open_mode(IslandsMode(device_type, functools.partial(islands, device_type)))


@contextlib.contextmanager
def _open_mode(mode: IslandsMode) -> Iterator[None]:
    """Let a mode act, and remove every occurrence of it afterwards: an interrupt in a function that the mode has
    entered may leave one."""
    try:
        mode.open()
        yield
    finally:
        mode.close()


def without_islands() -> contextlib.AbstractContextManager[None]:
    """Context manager around code that computes in float32 by itself, in which no islands act."""
    if torch.compiler.is_compiling():
        return NULL_CONTEXT
    modes = open_modes()
    return _without_mode() if modes and isinstance(modes[-1], IslandsMode) else KernelsOff()


@contextlib.contextmanager
def _without_mode() -> Iterator[None]:
    """Take the innermost mode off the stack."""
    mode = pop_mode()
    try:
        yield
    finally:
        push_mode(mode)


def close_interrupted_modes() -> None:
    """Remove modes whose blocks have ended, but which torch put back on the stack after an interrupt."""
    for mode in open_modes():
        if isinstance(mode, IslandsMode | OpRulesMode) and mode.closed:
            remove_mode(mode)


class DeviceAutocastState(NamedTuple):
    """State of autocast on one device type."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    islands: bool
    rules: RuleChanges = ()


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
        current = current_islands(kind)
        acting = current is not None and current.acting
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        regions.append(DeviceAutocastState(kind, enabled, dtype, acting, current_changes(kind)))
    return AutocastState(tuple(regions), torch.is_autocast_cache_enabled(), any(region.islands for region in regions))


@contextlib.contextmanager
def restore_autocast_state(state: AutocastState) -> Iterator[None]:
    """Context manager that restores a captured state, in any thread."""
    if not state.regions:
        setting = backward_pass_setting() if state.has_islands else None
        try:
            if setting is not None:
                setting[0].backward_pass_autocast = EAGER_BACKWARD
            yield
        finally:
            if setting is not None:
                config, value = setting
                config.backward_pass_autocast = value
        return
    first, *others = state.regions
    with (
        TorchAutocast(first.device_type, dtype=first.dtype, enabled=first.enabled, cache_enabled=state.cache),
        islands(first.device_type, acting=first.islands),
        op_rules_region(first.device_type, first.rules),
        restore_autocast_state(state._replace(regions=tuple(others))),
    ):
        yield

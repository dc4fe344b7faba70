"""The stack of open autocast regions of a thread. A region always closes completely, even on a Ctrl-C in its own code.

An interrupt may come between any two lines of Python, so also while a region is opened or closed; torch's own region
then stays on for good. A region here records the previous state of its thread and restores exactly that:

- After an interrupt during opening or closing, it restores the state at once.
- After an interrupt that prevents `__exit__` from starting, the enclosing region restores it, if that is polyamp's.
- Otherwise it is restored when the exception, and with it the last reference to the `autocast` object, is gone.
- At the latest, `close_stale_blocks` restores it. Every outermost region, `PolicyModule` call and step begins with it.

A compiler traces `autocast._traced_region` instead, which has no state.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import operator
import sys
import weakref
from types import FrameType
from typing import Any, Final, NamedTuple

import torch

from polyamp_torch.compat import (
    EAGER_BACKWARD,
    NULL_CONTEXT,
    TorchAutocast,
    backward_pass_setting,
    open_mode_count,
)
from polyamp_torch.precision.torch_only.float32_islands import (
    DEVICE_TYPES,
    Islands,
    close_interrupted_modes,
    current_islands,
    make_islands,
)
from polyamp_torch.precision.torch_only.op_rules import RuleChanges
from polyamp_torch.precision.torch_only.op_rules_mode import op_rules_region
from polyamp_torch.precision.torch_only.open_blocks import OPEN_BLOCKS

_WITH_INSTRUCTIONS: Final = ("BEFORE_WITH", "SETUP_WITH")
"""Opcodes of a `with` statement. Python 3.14 has another; `close_stale_blocks` then waits for the object's end."""
_CALL: Final = operator.methodcaller("__call__")
_GENERATOR_FLAGS: Final = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class RegionBlock:
    """Base class of regions and installed models. It records the code that opened it; a second `close` has no effect.

    Attributes:
        owner: the object of the `with` statement, if it is not the block itself.
        frame: the frame that opened the block, and `instruction`, the position in it.
    """

    owner: weakref.ref[Any] | None = None
    frame: FrameType | None = None
    instruction = 0

    def open(self) -> None:
        """Open the block; it is closed again if that fails."""
        raise NotImplementedError  # abstract: each kind of block has its own

    def close(self, *, interrupted: bool) -> None:
        """Restore the previous state; a second call has no effect.

        Args:
            interrupted: an exception is propagating, so blocks that are still open inside were left open.
        """
        raise NotImplementedError  # abstract: each kind of block has its own

    def __enter__(self, frame: FrameType | None = None, entered: Any = None) -> Any:
        """Open the block for the `with` statement that runs in `frame`, and return `entered`, the value it binds."""
        self.frame = frame or sys._getframe(1)
        self.instruction = self.frame.f_lasti
        try:
            self.open()
            return entered
        except BaseException:
            self.close(interrupted=True)
            raise

    def __exit__(self, error: Any, *_: object) -> None:
        try:
            self.close(interrupted=error is not None)
        except BaseException:
            self.close(interrupted=True)
            raise

    def left_behind(self) -> bool:
        """Return whether the `with` statement that opened the block has ended, as far as that is known."""
        if self.owner is not None and self.owner() is None:
            return True
        frame = self.frame
        if frame is None or frame.f_code.co_flags & _GENERATOR_FLAGS:  # a suspended generator is on no stack
            return False
        if (
            dis.opname[frame.f_code.co_code[self.instruction]] not in _WITH_INSTRUCTIONS
        ):  # an ExitStack, or a direct call
            return False
        running: FrameType | None = sys._getframe(1)
        while running is not None:
            if running is frame:
                return False
            running = running.f_back
        return True


class RegionSettings(NamedTuple):
    """Settings of a region.

    Attributes:
        device_type: "cpu", "cuda", ...
        dtype: the dtype of matrix products; None for torch's default of the device.
        enabled: whether autocast is on.
        acting: whether the islands act.
        cache: whether torch keeps cast copies of weights.
        rules: the policy's `op_rules`.
    """

    device_type: str
    dtype: torch.dtype | None
    enabled: bool
    acting: bool
    cache: bool = False
    rules: RuleChanges = ()


class AutocastRegion(RegionBlock):
    """Autocast region that is entered once.

    Args:
        setting: its settings.
        outer: a context manager around the region, such as the float32 matmul precision, or `NULL_CONTEXT`.

    Attributes:
        before: the previous state: whether autocast was on, its dtype, whether the cache was on, the nesting depth.
        islands: the islands that the region has opened, or switched on or off; None if it changed none.
    """

    before: tuple[bool, torch.dtype, bool, int]

    def __init__(self, setting: RegionSettings, outer: contextlib.AbstractContextManager[None]) -> None:
        self.setting = setting
        self.outer = outer
        self.islands: Islands | None = None
        self._is_new = False
        self._backward_pass: tuple[Any, str] | None = None
        self._settings: list[contextlib.AbstractContextManager[None]] = []

    def open(self) -> None:
        kind, dtype, on, acting, cache, rules = self.setting
        enabled, fast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self.before = (enabled, fast, torch.is_autocast_cache_enabled(), autocast_nesting())
        OPEN_BLOCKS.regions.append(self)
        if self.outer is not NULL_CONTEXT:
            self._settings.append(self.outer)
            self.outer.__enter__()
        if not on:
            TorchAutocast(kind, dtype=dtype, enabled=False).__enter__()  # type: ignore[no-untyped-call]  # torch's
            if rules or open_mode_count():
                self._open_rules(kind, rules)
            return
        TorchAutocast(kind, dtype=dtype, cache_enabled=cache).__enter__()  # type: ignore[no-untyped-call]  # torch's
        current = current_islands(kind)
        if current is None and acting:
            self.islands, self._is_new = make_islands(kind), True
            self.islands.open()
        elif current is not None and current.acting is not acting:
            self.islands = current
            current.switch(acting)
        if rules or open_mode_count():
            self._open_rules(kind, rules)  # last: they see a call before the islands do
        self._backward_pass = backward_pass_setting()
        if self._backward_pass is not None:
            self._backward_pass[0].backward_pass_autocast = EAGER_BACKWARD

    def _open_rules(self, kind: str, rules: RuleChanges) -> None:
        changed = op_rules_region(kind, rules)
        if changed is not NULL_CONTEXT:
            self._settings.append(changed)  # first: an interrupt may come right after its __enter__
            changed.__enter__()

    def close(self, *, interrupted: bool) -> None:
        if self not in OPEN_BLOCKS.regions:
            return
        if interrupted:
            while OPEN_BLOCKS.regions[-1] is not self:
                OPEN_BLOCKS.regions[-1].close(interrupted=True)
        enabled, dtype, cache, depth = self.before
        if self._backward_pass is not None:
            config, value = self._backward_pass
            config.backward_pass_autocast = value
        for setting in reversed(self._settings):
            setting.__exit__(None, None, None)
        if self.islands is not None:
            if self._is_new:
                self.islands.close()
            else:
                self.islands.switch(not self.setting.acting)
        torch.set_autocast_enabled(self.setting.device_type, enabled)
        torch.set_autocast_dtype(self.setting.device_type, dtype)
        torch.set_autocast_cache_enabled(cache)
        if not interrupted:
            _leave_nested_region()
        else:
            while autocast_nesting() > depth:
                _leave_nested_region()
        OPEN_BLOCKS.regions.remove(self)
        self.frame = self.owner = None


def shield() -> contextlib.AbstractContextManager[None]:
    """Context manager that turns enclosing autocast regions off on every device type (S3).

    A backward pass runs under the region that is open where it begins, and so do the products in some optimizers. A
    step inside a user's `torch.autocast` would round its gradients, or lose them. It is free without one.

    Example:
        >>> x = torch.ones(2, 2)
        >>> with torch.autocast("cpu", torch.bfloat16), shield():
        ...     (x @ x).dtype
        torch.float32
    """
    region: contextlib.AbstractContextManager[None] = NULL_CONTEXT
    for kind in filter(torch.is_autocast_enabled, DEVICE_TYPES):
        off = RegionSettings(kind, torch.get_autocast_dtype(kind), enabled=False, acting=False)
        region = AutocastRegion(off, region)
    return region


def close_stale_blocks() -> None:
    """Close blocks that an interrupt left open in this thread. It costs nothing if none is open."""
    for blocks in (OPEN_BLOCKS.regions, OPEN_BLOCKS.installed):
        while blocks and blocks[-1].left_behind():
            blocks[-1].close(interrupted=True)
    if open_mode_count():
        close_interrupted_modes()


def innermost_region(owner: Any) -> RegionBlock | None:
    """Return the innermost region in this thread that an `autocast` object has opened, or None."""
    regions: list[RegionBlock] = OPEN_BLOCKS.regions
    for block in reversed(regions):
        if block.owner is not None and block.owner() is owner:
            return block
    return None


def weak_owner_reference(owner: Any) -> weakref.ref[Any]:
    """Return a weak reference to the owner of a region; the region is closed if the owner dies without closing it."""
    return weakref.ref(owner, lambda _: close_stale_blocks())


def autocast_nesting() -> int:
    """Return the nesting depth of torch's regions. torch returns it only on a change, so one call of C code, which
    cannot be interrupted, changes it twice."""
    found: list[int] = list(map(_CALL, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting)))
    return found[1]


def _leave_nested_region() -> None:
    """End one nested region, as torch does; after the last, clear torch's weight cache."""
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()

"""`Region`: one open autocast region, which closes whole whatever happens, a Ctrl-C in its own code included.

An interrupt may come between any two lines of Python, so also while a region is opened or closed; torch's own then
stays on for good. A region here notes what was there before, thread by thread, and puts back exactly that:

- an interrupt while it is opened, or in the midst of closing, is answered at once;
- one that keeps `__exit__` from starting is answered by the region around it, if that is polyamp's, else as soon as the
  exception is gone and with it the last reference to the `autocast` object, and at the latest by `repair`, which every
  outermost region, bound model and step begins with.

Called by `autocast` and `bound`. A compiler traces `autocast.traced` instead, which has no state.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import operator
import sys
import threading
import weakref
from types import FrameType
from typing import Any, Final, NamedTuple

import torch

from polyamp_torch.compat import (
    NOTHING,
    PlainAutocast,
    backward_as_eager,
    modes_are_open,
    open_modes,
    pop_mode,
    push_mode,
)
from polyamp_torch.precision.islands import Islands, current

_WITH: Final = ("BEFORE_WITH", "SETUP_WITH")
"""The instruction of a `with` statement; Python 3.14 has another, and `repair` then waits for the object's end."""
_CALLED: Final = operator.methodcaller("__call__")
_SUSPENDED: Final = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class _Opened(threading.local):
    """What is open in one thread.

    Attributes:
        regions: the regions, innermost last.
        bound: the models whose casts and overrides are installed, innermost last.
        installed: the blocks in which they are, where they are not traced.
        placed: what is installed by a function that a compiler traces.
        overrides: the overridden modules that are running: whose they are, and their dtype.
        functions: the policies of the functions that are running under one, and how many models were bound outside.
        traced: the regions of a function that a compiler traces.
    """

    def __init__(self) -> None:
        self.regions: list[Block] = []
        self.bound: list[Any] = []
        self.installed: list[Any] = []
        self.placed: list[Any] = []
        self.traced: list[contextlib.AbstractContextManager[None]] = []
        self.overrides: list[tuple[Any, str]] = []
        self.functions: list[tuple[Any, int]] = []


OPENED: Final = _Opened()


class Block:
    """What regions and installed models have in common: they know who opened them, and close a second time for nothing.

    Attributes:
        owner: the object that a `with` statement holds in the block's place, if it is another one.
        frame: the code that opened the block, and `instruction`, where in it.
    """

    owner: weakref.ref[Any] | None = None
    frame: FrameType | None = None
    instruction = 0

    def open(self) -> None:
        """Open the block; it is closed again if that fails."""
        raise NotImplementedError  # abstract: each kind of block has its own

    def close(self, *, interrupted: bool) -> None:
        """Put back what was there before; a second time changes nothing.

        Args:
            interrupted: an exception is on its way, so what was opened inside and is still there was left behind.
        """
        raise NotImplementedError  # abstract: each kind of block has its own

    def opened_in(self, frame: FrameType, entered: Any = None) -> Any:
        """Open the block for the `with` statement that runs in `frame`, and return `entered`, what it binds."""
        self.frame, self.instruction = frame, frame.f_lasti
        try:
            self.open()
            return entered
        except BaseException:
            self.close(interrupted=True)
            raise

    def __enter__(self) -> None:
        self.opened_in(sys._getframe(1))

    def __exit__(self, error: Any, *_: object) -> None:
        try:
            self.close(interrupted=error is not None)
        except BaseException:
            self.close(interrupted=True)
            raise

    def left_behind(self) -> bool:
        """Whether the `with` statement that opened the block has ended, as far as that can be told."""
        if self.owner is not None and self.owner() is None:
            return True
        frame = self.frame
        if frame is None or frame.f_code.co_flags & _SUSPENDED:  # a suspended generator is on no stack
            return False
        if dis.opname[frame.f_code.co_code[self.instruction]] not in _WITH:  # an ExitStack, or called by hand
            return False
        running: FrameType | None = sys._getframe(1)
        while running is not None:
            if running is frame:
                return False
            running = running.f_back
        return True


class Kept:
    """The islands of a device type, kept acting or not acting; closed a second time for nothing."""

    def __init__(self, device_type: str, *, acting: bool = True) -> None:
        self.device_type = device_type
        self.acting = acting
        self.mode: Islands | None = None
        self.pushed = False

    def open(self) -> None:
        """Push the mode, or switch the one that is there."""
        mode = current(self.device_type)
        if mode is None:
            if self.acting:
                self.mode, self.pushed = Islands(self.device_type), True
                push_mode(self.mode)
        elif mode.acting is not self.acting:
            self.mode = mode
            mode.acting = self.acting

    def close(self) -> None:
        """Put back what was there."""
        if self.mode is not None:
            if self.pushed:
                self.mode.closed, self.mode.acting = True, False
                _remove(self.mode)
            else:
                self.mode.acting = not self.acting


class Setting(NamedTuple):
    """What a region sets.

    Attributes:
        device_type: "cpu", "cuda", ...
        dtype: what matrix products run in; None for torch's for the device.
        enabled: whether autocast is on.
        acting: whether the islands act.
        cache: whether torch keeps cast copies of weights.
    """

    device_type: str
    dtype: torch.dtype | None
    enabled: bool
    acting: bool
    cache: bool = False


class Region(Block):
    """One region, to be entered once.

    Args:
        setting: what it sets.
        precision: the block that holds float32 matmul precision, or `NOTHING`.

    Attributes:
        before: what was there: whether autocast was on, its dtype, whether the cache was on, how deep regions nested.
    """

    before: tuple[bool, torch.dtype, bool, int]

    def __init__(self, setting: Setting, precision: contextlib.AbstractContextManager[None]) -> None:
        self.setting = setting
        self.precision = precision
        self._islands = Kept(setting.device_type, acting=setting.acting)
        self._settings: list[contextlib.AbstractContextManager[None]] = []

    def open(self) -> None:
        kind, dtype, on, _, cache = self.setting
        enabled, fast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self.before = (enabled, fast, torch.is_autocast_cache_enabled(), nesting())
        OPENED.regions.append(self)
        if self.precision is not NOTHING:
            self._settings.append(self.precision)
            self.precision.__enter__()
        if not on:
            PlainAutocast(kind, dtype=dtype, enabled=False).__enter__()  # type: ignore[no-untyped-call]  # torch's
            return
        PlainAutocast(kind, dtype=dtype, cache_enabled=cache).__enter__()  # type: ignore[no-untyped-call]  # torch's
        self._islands.open()
        compiled = backward_as_eager()
        if compiled is not NOTHING:
            self._settings.append(compiled)  # first: an interrupt may come right behind its __enter__
            compiled.__enter__()

    def close(self, *, interrupted: bool) -> None:
        if self not in OPENED.regions:
            return
        if interrupted:
            while OPENED.regions[-1] is not self:
                OPENED.regions[-1].close(interrupted=True)
        enabled, dtype, cache, depth = self.before
        for setting in reversed(self._settings):
            setting.__exit__(None, None, None)
        self._islands.close()
        torch.set_autocast_enabled(self.setting.device_type, enabled)
        torch.set_autocast_dtype(self.setting.device_type, dtype)
        torch.set_autocast_cache_enabled(cache)
        _unnest(depth, once=not interrupted)
        OPENED.regions.remove(self)
        self.frame = self.owner = None


def repair() -> None:
    """Close what an interrupt left open in this thread. Free where nothing is open."""
    for blocks in (OPENED.regions, OPENED.installed):
        while blocks and blocks[-1].left_behind():
            blocks[-1].close(interrupted=True)
    if modes_are_open():
        for mode in open_modes():
            if isinstance(mode, Islands) and mode.closed:
                _remove(mode)


def innermost(owner: Any) -> Block | None:
    """The innermost region in this thread that an `autocast` object has opened."""
    for block in reversed(OPENED.regions):
        if block.owner is not None and block.owner() is owner:
            return block
    return None


def owned(owner: Any) -> weakref.ref[Any]:
    """The owner of a region that is closed when the owner is gone without having closed it."""
    return weakref.ref(owner, lambda _: repair())


def nesting() -> int:
    """How deep torch's regions are nested. torch tells it only with a change, so it is changed twice, in one call of C
    code, in which no interrupt can come."""
    found: list[int] = list(map(_CALLED, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting)))
    return found[1]


def _unnest(wanted: int, *, once: bool) -> None:
    """End nested regions: one, as torch does, or all above a depth. torch drops its cast copies after the last."""
    while once or nesting() > wanted:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        if once:
            return


def _remove(mode: Islands) -> None:
    """Take a mode off the stack, wherever and however often it is there, without touching the others."""
    stack = open_modes()
    if stack and stack[-1] is mode:
        pop_mode()
        stack.pop()
    if any(entry is mode for entry in stack):
        for _ in stack:
            pop_mode()
        for entry in stack:
            if entry is not mode:
                push_mode(entry)

"""Blocks that end although an interrupt kept their end from running: what a Ctrl-C leaves on is taken off at the next
step.

A `KeyboardInterrupt` arrives between any two lines, also between the setting of something and the `try` that takes it
back, and inside a `finally`. So what a step sets for a time (the layers' policies, a recording tape, an optimizer's
methods) is noted before it is set, with the frame whose block it is; a note whose frame no longer runs is stale, and
`repair` does what the block's end would have done. Called by the step, the policies and `replicas`.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final

_OPEN: Final[list[ending]] = []


class ending:  # noqa: N801  # read as `with ending(...)`, like contextlib.closing
    """`with ending(undo):` calls `undo` at the end of the block, or in `repair` if an interrupt prevented that.

    Args:
        undo: takes back what the block sets, as far as it is set; it may be called twice.

    Example:
        >>> light = ["off"]
        >>> with ending(lambda: light.__setitem__(0, "off")):
        ...     light[0] = "on"
        >>> light
        ['off']
    """

    __slots__ = ("_frame", "_thread", "_undo")

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo = undo
        self._thread = threading.get_ident()
        self._frame = _owner()
        _OPEN.append(self)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.finish()

    def finish(self) -> None:
        """End the block; a second call does nothing."""
        self._undo()
        if self in _OPEN:
            _OPEN.remove(self)

    def is_stale(self, running: set[int]) -> bool:
        """True if the block's frame is not among the ids of those that run in this thread, or its thread is gone."""
        if self._thread == threading.get_ident():
            return id(self._frame) not in running
        return self._thread not in sys._current_frames()


def repair() -> None:
    """End the blocks of this thread that an interrupt left open, and those of threads that are no more."""
    if not _OPEN:
        return
    running = set()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        running.add(id(frame))
        frame = frame.f_back
    for block in reversed(list(_OPEN)):
        if block.is_stale(running):
            block.finish()


def _owner() -> FrameType | None:
    """The function that the block stands in: not a generator, whose frame rests while the block of its caller runs."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (
        frame.f_code.co_flags & inspect.CO_GENERATOR or frame.f_code.co_filename == contextlib.__file__
    ):
        frame = frame.f_back
    return frame

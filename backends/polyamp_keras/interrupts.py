"""Context manager whose undo runs even if a `KeyboardInterrupt` skips the end of the block; `replace_methods`.

A `KeyboardInterrupt` can arrive between any two lines: between a change and the `try` that undoes it, or inside a
`finally`. Temporary changes of a step are the layers' policies, a recording tape and an optimizer's methods. Each is
registered before it is made, together with the frame that owns the block. A registered block whose frame no longer runs
is stale: `close_stale_blocks` runs its undo at the next step.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Final

_OPEN_BLOCKS: Final[list[EnsureUndo]] = []


class EnsureUndo:  # used as `with EnsureUndo(...)`, like contextlib.closing
    """Context manager that calls `undo` at the end of the block, or in `close_stale_blocks` after an interrupt.

    Args:
        undo: reverts the changes of the block, also after only some of them were made. It may be called twice.

    Example:
        >>> light = ["off"]
        >>> with EnsureUndo(lambda: light.__setitem__(0, "off")):
        ...     light[0] = "on"
        >>> light
        ['off']
    """

    __slots__ = ("_frame", "_thread", "_undo")

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo = undo
        self._thread = threading.get_ident()
        self._frame = _owner_frame()
        _OPEN_BLOCKS.append(self)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.finish()

    def finish(self) -> None:
        """End the block; a second call does nothing."""
        self._undo()
        if self in _OPEN_BLOCKS:
            _OPEN_BLOCKS.remove(self)

    def is_stale(self, running: set[int]) -> bool:
        """Return whether the block's frame is not in `running` (ids of this thread's frames), or its thread ended."""
        if self._thread == threading.get_ident():
            return id(self._frame) not in running
        return self._thread not in sys._current_frames()


def close_stale_blocks() -> None:
    """End the blocks that an interrupt left open in this thread, and those of threads that have ended."""
    if not _OPEN_BLOCKS:
        return
    running = set()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        running.add(id(frame))
        frame = frame.f_back
    for block in reversed(list(_OPEN_BLOCKS)):
        if block.is_stale(running):
            block.finish()


def _owner_frame() -> FrameType | None:
    """Return the frame of the function that contains the block, skipping generators, which are suspended meanwhile."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (
        frame.f_code.co_flags & inspect.CO_GENERATOR or frame.f_code.co_filename == contextlib.__file__
    ):
        frame = frame.f_back
    return frame


@contextlib.contextmanager
def replace_methods(model: Any, methods: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Context manager in which an object has other methods, by name."""
    before = {name: vars(model)[name] for name in methods if name in vars(model)}
    try:
        for name, method in methods.items():
            setattr(model, name, method)
        yield
    finally:
        for name in methods:
            if name in before:
                setattr(model, name, before[name])
            else:
                delattr(model, name)

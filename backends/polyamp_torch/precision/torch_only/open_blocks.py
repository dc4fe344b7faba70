"""`OPEN_BLOCKS`: the autocast regions, installed models and running overrides of each thread."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Final


class _OpenBlocks(threading.local):
    """Open blocks of one thread.

    Attributes:
        regions: the regions, innermost last.
        bound: the models whose casts and overrides are installed, innermost last.
        installed: the blocks that installed them, outside of traced functions.
        placed: the installations of a function that a compiler traces.
        overrides: the running overridden modules: their installation, and their dtype.
        functions: the policies of the running functions that have one, and the length of `bound` outside of each.
        traced: the regions of a function that a compiler traces.
    """

    def __init__(self) -> None:
        self.regions: list[Any] = []
        self.bound: list[Any] = []
        self.installed: list[Any] = []
        self.placed: list[Any] = []
        self.traced: list[contextlib.AbstractContextManager[None]] = []
        self.overrides: list[tuple[Any, str]] = []
        self.functions: list[tuple[Any, int]] = []


OPEN_BLOCKS: Final = _OpenBlocks()


def running_override() -> str | None:
    """Return the dtype that an override gives the innermost module that runs, or None if none does."""
    return OPEN_BLOCKS.overrides[-1][1] if OPEN_BLOCKS.overrides else None

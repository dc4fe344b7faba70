"""One thread at a time for a state: a checkpoint that another thread writes holds whole steps only (S22).

A step changes running statistics in its forward pass and weights at its end, so it has its turn from beginning to end,
and an export waits for it. Called by the state, the step and the compiled step.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack


class Turn:
    """A lock that one thread may take several times, and that goes round: who waits gets it before who had it last.

    Copies and pickles are new locks.

    Example:
        >>> turn = Turn()
        >>> with turn, turn:
        ...     pass
    """

    __slots__ = ("_depth", "_lock", "_next", "_owner")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        thread = threading.get_ident()
        if self._owner != thread:
            with self._next:  # whoever waits for the lock holds this, so that the one who had it last queues up here
                self._lock.acquire()
            self._owner = thread
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.release()

    def __reduce__(self) -> tuple[type[Turn], tuple[()]]:
        return Turn, ()


def together(turns: Sequence[Turn]) -> ExitStack:
    """Several locks, taken in one order whatever order they come in, so that two threads never wait for each other."""
    stack = ExitStack()
    for turn in sorted(turns, key=id):
        stack.enter_context(turn)
    return stack

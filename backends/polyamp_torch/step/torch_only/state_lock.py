"""Fair re-entrant lock that serialises steps and checkpoint exports of one state (S22).

A step changes running statistics in its forward pass and weights at its end. So it holds the lock from beginning to
end, and a checkpoint that another thread writes contains complete steps only.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack


class StateLock:
    """Fair re-entrant lock: a waiting thread acquires it before the thread that released it last.

    Copies and pickles are new locks.

    Example:
        >>> turn = StateLock()
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
            with self._next:  # held by the first waiting thread; the last owner queues up here
                self._lock.acquire()
            self._owner = thread
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.release()

    def __reduce__(self) -> tuple[type[StateLock], tuple[()]]:
        return StateLock, ()


def acquire_all(turns: Sequence[StateLock]) -> ExitStack:
    """Acquire several locks in a fixed order, so that two threads never deadlock."""
    stack = ExitStack()
    for turn in sorted(turns, key=id):
        stack.enter_context(turn)
    return stack

"""A step as a critical section: deferral of SIGINT (Ctrl-C), and the lock of a state.

`DeferInterrupts` delivers SIGINT only while user code or the backward pass runs. So an interrupted step has either
changed nothing yet, or is complete: no update is half applied, and stashed values are restored. This concerns the main
thread, the only one that signals reach. Other exceptions are handled by `finally` clauses.

`StateLock` serialises steps and checkpoint exports of one state (S22). A step changes running statistics in its forward
pass and weights at its end. So it holds the lock from beginning to end, and a checkpoint that another thread writes
contains complete steps only.
"""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final

_SIGNAL_MODULE: Final[Any] = importlib.import_module("_signal")
"""C module below `signal`. Calling it avoids the look-up of signal names, which takes 90 % of a call."""
_SIGINT: Final = int(signal.SIGINT)


class DeferInterrupts:
    """Context manager that defers SIGINT. A signal that arrives inside is passed to its handler on exit.

    Attributes:
        allowed: context manager inside, in which interrupts are delivered: for user code and long operations.

    Example:
        >>> before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" has SIGINT ignored
        >>> seen = []
        >>> try:
        ...     with DeferInterrupts():
        ...         signal.raise_signal(signal.SIGINT)
        ...         seen.append("whole")
        ... except KeyboardInterrupt:
        ...     seen.append("interrupted")
        >>> seen
        ['whole', 'interrupted']
        >>> _ = signal.signal(signal.SIGINT, before)
    """

    __slots__ = ("_came", "_handler", "_open", "allowed")

    def __init__(self) -> None:
        self.allowed = AllowInterrupts(self)
        self._came = False
        self._open = False
        self._handler: Any = None

    def __enter__(self) -> DeferInterrupts:
        if threading.current_thread() is threading.main_thread():
            self._handler = _SIGNAL_MODULE.getsignal(
                _SIGINT
            )  # None if it was not set from Python: then it is not replaced
            if self._handler is not None:
                _SIGNAL_MODULE.signal(_SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self._handler is None:
            return
        if _SIGNAL_MODULE.getsignal(_SIGINT) == self._note:  # user code may have set another handler, which stays
            _SIGNAL_MODULE.signal(_SIGINT, self._handler)
        if self._came:
            _SIGNAL_MODULE.raise_signal(_SIGINT)

    def _note(self, number: int, frame: Any) -> None:
        """Handle SIGINT. The handler stays installed in both contexts, because setting it is expensive."""
        if not self._open:
            self._came = True
        elif callable(self._handler):
            self._handler(number, frame)
        elif self._handler == _SIGNAL_MODULE.SIG_DFL:  # the default action ends the process
            _SIGNAL_MODULE.signal(number, self._handler)
            _SIGNAL_MODULE.raise_signal(number)


class AllowInterrupts:
    """Context manager of `DeferInterrupts.allowed`."""

    __slots__ = ("_deferred",)

    def __init__(self, deferred: DeferInterrupts) -> None:
        self._deferred = deferred

    def __enter__(self) -> None:
        """Deliver interrupts at once from here on, including a deferred one."""
        deferred = self._deferred
        deferred._open = True
        if deferred._came:
            deferred._came = False
            _SIGNAL_MODULE.raise_signal(_SIGINT)

    def __exit__(self, *error: object) -> None:
        self._deferred._open = False


class StateLock:
    """Fair re-entrant lock: a waiting thread acquires it before the thread that released it last.

    Copies and pickles are new locks.

    Example:
        >>> lock = StateLock()
        >>> with lock, lock:
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


def acquire_all(locks: Sequence[StateLock]) -> ExitStack:
    """Acquire several locks in a fixed order, so that two threads never deadlock."""
    stack = ExitStack()
    for lock in sorted(locks, key=id):
        stack.enter_context(lock)
    return stack

"""Ctrl-C in a step: it arrives while user code or the backward pass runs, and waits everywhere else.

So an interrupted step has either not begun to change anything, or is complete: no update is half applied, and what the
step had set aside is put back. Called by the step and the compiled step. It is for the main thread, the only one that
signals reach; other exceptions find `finally` clauses.
"""

from __future__ import annotations

import signal
import threading
from typing import Any


class Undisturbed:
    """A block that a SIGINT does not end before its end. What comes meanwhile is handed to its handler afterwards.

    Example:
        >>> seen = []
        >>> try:
        ...     with Undisturbed():
        ...         signal.raise_signal(signal.SIGINT)
        ...         seen.append("whole")
        ... except KeyboardInterrupt:
        ...     seen.append("interrupted")
        >>> seen
        ['whole', 'interrupted']
    """

    __slots__ = ("_came", "_handler")

    def __init__(self) -> None:
        self._came = False
        self._handler: Any = None

    def __enter__(self) -> Undisturbed:
        self._came = False
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.getsignal(signal.SIGINT)  # None for one that was not set from Python: then it stays
            if self._handler is not None:
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        self.let_through()

    def let_through(self) -> None:
        """From here on an interrupt arrives at once, and so does one that came before."""
        if self._handler is None:
            return
        signal.signal(signal.SIGINT, self._handler)
        if self._came:
            self._came = False
            signal.raise_signal(signal.SIGINT)

    @property
    def disturbed(self) -> Disturbed:
        """A block inside, in which interrupts arrive: around user code, and what may take long."""
        return Disturbed(self)

    def hold_back(self) -> None:
        """The opposite of `let_through`. A handler that user code has set meanwhile is kept."""
        if self._handler is not None:
            before = signal.signal(signal.SIGINT, self._note)
            self._handler = self._handler if before is None else before

    def _note(self, *_: object) -> None:
        self._came = True


class Disturbed:
    """See `Undisturbed.disturbed`."""

    __slots__ = ("_around",)

    def __init__(self, around: Undisturbed) -> None:
        self._around = around

    def __enter__(self) -> None:
        self._around.let_through()

    def __exit__(self, *error: object) -> None:
        self._around.hold_back()

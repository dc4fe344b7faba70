"""Ctrl-C in a step: it arrives while user code or the backward pass runs, and waits everywhere else.

So an interrupted step has either not begun to change anything, or is complete: no update is half applied, and what the
step had set aside is put back. Called by the step and the compiled step. It is for the main thread, the only one that
signals reach; other exceptions find `finally` clauses.
"""

from __future__ import annotations

import importlib
import signal
import threading
from typing import Any, Final

_PLAIN: Final[Any] = importlib.import_module("_signal")
"""What `signal` itself calls after it has looked for the names of numbers, which is 9 of 10 parts of a call."""
_NUMBER: Final = int(signal.SIGINT)


class Undisturbed:
    """A block that a SIGINT does not end before its end. What comes meanwhile is handed to its handler afterwards.

    Example:
        >>> before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" has SIGINT ignored
        >>> seen = []
        >>> try:
        ...     with Undisturbed():
        ...         signal.raise_signal(signal.SIGINT)
        ...         seen.append("whole")
        ... except KeyboardInterrupt:
        ...     seen.append("interrupted")
        >>> seen
        ['whole', 'interrupted']
        >>> _ = signal.signal(signal.SIGINT, before)
    """

    __slots__ = ("_came", "_handler", "_open")

    def __init__(self) -> None:
        self._came = False
        self._open = False
        self._handler: Any = None

    def __enter__(self) -> Undisturbed:
        if threading.current_thread() is threading.main_thread():
            self._handler = _PLAIN.getsignal(_NUMBER)  # None for one that was not set from Python: then it stays
            if self._handler is not None:
                _PLAIN.signal(_NUMBER, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self._handler is None:
            return
        if _PLAIN.getsignal(_NUMBER) == self._note:  # user code may have set another one, for good
            _PLAIN.signal(_NUMBER, self._handler)
        if self._came:
            _PLAIN.raise_signal(_NUMBER)

    @property
    def disturbed(self) -> Disturbed:
        """A block inside, in which interrupts arrive: around user code, and what may take long."""
        return Disturbed(self)

    def let_through(self) -> None:
        """From here on an interrupt arrives at once, and so does one that came before."""
        self._open = True
        if self._came:
            self._came = False
            _PLAIN.raise_signal(_NUMBER)

    def hold_back(self) -> None:
        """The opposite of `let_through`."""
        self._open = False

    def _note(self, number: int, frame: Any) -> None:
        """The handler: setting it is what costs, so it stays in both kinds of block."""
        if not self._open:
            self._came = True
        elif callable(self._handler):
            self._handler(number, frame)
        elif self._handler == _PLAIN.SIG_DFL:  # which ends the process
            _PLAIN.signal(number, self._handler)
            _PLAIN.raise_signal(number)


class Disturbed:
    """See `Undisturbed.disturbed`."""

    __slots__ = ("_around",)

    def __init__(self, around: Undisturbed) -> None:
        self._around = around

    def __enter__(self) -> None:
        self._around.let_through()

    def __exit__(self, *error: object) -> None:
        self._around.hold_back()

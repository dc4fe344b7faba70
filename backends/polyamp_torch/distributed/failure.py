"""What a rank does when it, or another one, fails: the guard around a step, and the store that says who it was (S32).

Called by `step.replicas`. What ranks compare, leave for each other and say is `polyamp.rules.replicas` and
`polyamp.rules.roll_call`; here are torch's store, torch's errors, and one `Board` for each process group.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Final, TypeVar

import torch.distributed as dist

from polyamp.errors import ReplicaError
from polyamp.rules import meeting
from polyamp.rules.replicas import Group, lost_store, shortened
from polyamp.rules.roll_call import Board
from polyamp.rules.single_writer import SingleWriter
from polyamp_torch.compat import prefixed, timeout_of

_WORDS: Final = (
    "gloo/",
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting",
    "caused pair closure",
    "[Gloo]",
    "NCCL",
    "ProcessGroup",
)
"""What a `RuntimeError` of a collective holds in torch 2.7 to 2.13; others are a `torch.distributed.DistError`."""
_MARKS: Final = 1 << 20
"""Sums of so many from any number of ranks are exact in float64."""
_FIRST, _LONGEST = 0.001, 0.05
"""Seconds between two questions to the store, which become longer."""
ANSWER: Final = 5.0
"""Seconds within which the store answers a question, or it is lost."""
_Value = TypeVar("_Value")


class Kept:
    """A `polyamp.rules.replicas.Store` on the one that a process group was made with, which NCCL's has as well.

    It asks again and again instead of waiting in the store, whose client lets one thread in at a time. A store may stop
    answering without closing its connection (its process was stopped, its machine is lost), and its client then waits
    for ever: every call runs in a thread that is given up after `ANSWER` seconds, and the store is not asked again.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self._store = prefixed(prefix, store)
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        self._host = (store.host, store.port) if hasattr(store, "port") else None
        self._lost = False

    def reach(self) -> None:
        """See `Store`. torch itself would write its own stack to standard error if nobody answers."""
        self._check()
        if self._host is None:
            return
        with socket.create_connection(self._host, 2.0):
            pass

    def set(self, key: str, value: bytes) -> None:
        """See `Store`."""
        self._within(ANSWER, lambda: self._store.set(key, value))

    def get(self, key: str, seconds: float) -> bytes | None:
        """See `Store`."""

        def ask() -> bytes | None:
            end, pause = time.monotonic() + seconds, _FIRST
            while not self._store.check([key]):
                left = end - time.monotonic()
                if left <= 0 or self._lost:
                    return None
                time.sleep(min(pause, left))
                pause = min(1.5 * pause, _LONGEST)
            return bytes(self._store.get(key))

        return self._within(max(ANSWER, seconds + 1.0), ask)

    def add(self, key: str, number: int) -> int:
        """See `Store`."""
        return self._within(ANSWER, lambda: int(self._store.add(key, number)))

    def _check(self) -> None:
        if self._lost:
            raise ConnectionError("the store that the ranks share did not answer before")

    def _within(self, seconds: float, call: Callable[[], _Value]) -> _Value:
        """What a call gives, within a limit.

        Raises:
            ConnectionError: it raised, or did not come back in time.
        """
        self._check()
        found: list[_Value] = []
        raised: list[BaseException] = []

        def run() -> None:
            try:
                found.append(call())
            except BaseException as error:  # noqa: BLE001  # raised below, in the thread that asks
                raised.append(error)

        thread = threading.Thread(target=run, name="polyamp-store", daemon=True)
        thread.start()
        thread.join(seconds)
        if found:
            return found[0]
        if not raised:
            self._lost = True
            raise ConnectionError(f"the store that the ranks share did not answer within {seconds:g} s")
        if isinstance(raised[0], RuntimeError):
            raise ConnectionError(str(raised[0])) from raised[0]
        raise raised[0]


class PartedError(RuntimeError):
    """The ranks' one small reduction shows that they do not run the same program."""


class Guard:
    """A block around a step, on several ranks: what leaves it is told to the others, or is told by them.

    Attributes:
        board: the group's notices.
        inits: how many states were made on this group.
        second: the same for the second half of a step, which is not counted again.
        writer: the group's saves by one rank.
    """

    def __init__(self, board: Board, steps: int = 1) -> None:
        self.board = board
        self.inits = 0
        self.second = self if steps == 0 else Guard(board, 0)
        self.writer = SingleWriter(board.group)
        self._steps = steps

    def __enter__(self) -> None:
        board = self.board
        if board.broken:
            board.check()
        board.begun += self._steps
        board.inside = True

    def mark(self, state: int, gradients: int) -> int:
        """A small number that is the same on all ranks while their programs are."""
        return (self.board.begun * 7919 + state * 104729 + gradients * 1299709) % _MARKS

    def refuse(self, state: int, gradients: int) -> None:
        """Raise `PartedError`, with what this rank is at."""
        raise PartedError(f"step {self.board.begun}, of state {state}, with gradients of {gradients} parameters")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.board.inside = False
            return
        if of_a_collective(error):
            raise self._parted(error) from error
        self.board.raised(error)

    @contextlib.contextmanager
    def call_of_all(self, what: str) -> Iterator[None]:
        """A block of a call that is no step and needs every rank; see `polyamp.rules.meeting`. An error in it is on its
        way on all ranks, but for one of a collective, and one that ends the program."""
        with meeting.call_of_all(self.board, what):
            try:
                yield
            except BaseException as error:
                if of_a_collective(error):
                    raise self._parted(error) from error
                if not isinstance(error, Exception):
                    self.board.raised(error)
                raise

    def _parted(self, error: BaseException) -> ReplicaError:
        return self.board.parted(shortened(error, 300).partition(" This is typically caused by ")[0])


def of_a_collective(error: BaseException | None) -> bool:
    """Whether an error says that other ranks did not do their part; one that was raised from such an error does too.

    >>> of_a_collective(RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:40321"))
    True
    >>> of_a_collective(ValueError("Connection closed by peer"))
    False
    """
    while error is not None:
        if isinstance(error, dist.DistError | PartedError):
            return True
        if type(error) is RuntimeError and any(word in str(error) for word in _WORDS):
            return True
        error = error.__cause__
    return False


def guard_of(group: Any) -> Guard | None:
    """The one guard of a process group; None for one that only pretends to communicate.

    Raises:
        ReplicaError: the store of the group does not answer.
    """
    for reference, guard in _guards:
        if reference() is group:
            return guard
    if dist.get_backend(group) == "fake":
        return None
    _guards[:] = [each for each in _guards if each[0]() is not None]
    made = _made[group.group_name] = _made.get(group.group_name, 0) + 1
    store = Kept(group.get_group_store(), f"polyamp/{made}/")
    names = dist.get_process_group_ranks(group)
    seconds = timeout_of(group) or datetime.timedelta(minutes=30)
    launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun keeps it; else rank 0 does
    hosts = dist.get_rank() == 0 and not launched
    ranks = Group(store, dist.get_rank(group), names, seconds.total_seconds())
    try:
        guard = Guard(Board(ranks, hosts=hosts))
    except OSError as error:
        raise ReplicaError(lost_store(ranks)) from error
    guard.board.linger = guard.writer.is_needed
    _guards.append((weakref.ref(group), guard))
    return guard


_guards: Final[list[tuple[Any, Guard]]] = []
"""A guard lives as long as its group, which it does not hold: on all ranks for the same time."""
_made: Final[dict[str, int]] = {}
"""How many groups of a name there were: those of one name may share a store."""

"""Failure handling across ranks: the guard around a step, and a store with timeouts that reports who failed (S32).

The comparison and the messages are in `polyamp.rules.rank_comparison` and `polyamp.rules.failure_report`. This module
adds torch's store, torch's errors, and one `RankFailures` for each process group.
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
from polyamp.rules import collective_barrier
from polyamp.rules.failure_report import RankFailures
from polyamp.rules.rank_group import RankGroup, format_error, lost_store_message
from polyamp.rules.single_file_save import SingleWriter
from polyamp_torch.compat import group_timeout, make_prefix_store

_COLLECTIVE_ERROR_WORDS: Final = (
    "gloo/",
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting",
    "caused pair closure",
    "[Gloo]",
    "NCCL",
    "ProcessGroup",
)
"""Words in the `RuntimeError`s of collectives in torch 2.7 to 2.13; others are a `torch.distributed.DistError`."""
_MARK_MODULUS: Final = 1 << 20
"""Modulus of the program marks: sums of smaller numbers over any number of ranks are exact in float64."""
_FIRST, _LONGEST = 0.001, 0.05
"""Shortest and longest interval, in seconds, between two polls of the store; the interval grows."""
STORE_TIMEOUT: Final = 5.0
"""Seconds within which the store must answer; after that it counts as lost."""
_Value = TypeVar("_Value")


class TimeoutStore:
    """A `polyamp.rules.rank_group.RankStore` on the store of a process group, NCCL's included.

    It polls instead of waiting in the store, whose client serves one thread at a time. A store may stop answering
    without closing its connection, for example when its process or machine stops. Its client then waits for ever.
    So every call runs in a thread that is abandoned after `STORE_TIMEOUT` seconds, and the store is not used again.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self._store = make_prefix_store(prefix, store)
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        self._host = (store.host, store.port) if hasattr(store, "port") else None
        self._lost = False

    def reach(self) -> None:
        """See `RankStore`. torch's own connection attempt would print a stack trace to standard error on failure."""
        self._check()
        if self._host is None:
            return
        with socket.create_connection(self._host, 2.0):
            pass

    def set(self, key: str, value: bytes) -> None:
        """See `RankStore`."""
        self._within(STORE_TIMEOUT, lambda: self._store.set(key, value))

    def get(self, key: str, seconds: float) -> bytes | None:
        """See `RankStore`."""

        def ask() -> bytes | None:
            end, pause = time.monotonic() + seconds, _FIRST
            while not self._store.check([key]):
                left = end - time.monotonic()
                if left <= 0 or self._lost:
                    return None
                time.sleep(min(pause, left))
                pause = min(1.5 * pause, _LONGEST)
            return bytes(self._store.get(key))

        return self._within(max(STORE_TIMEOUT, seconds + 1.0), ask)

    def add(self, key: str, number: int) -> int:
        """See `RankStore`."""
        return self._within(STORE_TIMEOUT, lambda: int(self._store.add(key, number)))

    def _check(self) -> None:
        if self._lost:
            raise ConnectionError("the store that the ranks share did not answer before")

    def _within(self, seconds: float, call: Callable[[], _Value]) -> _Value:
        """Return the result of a call, within a time limit.

        Raises:
            ConnectionError: the call raised a RuntimeError, or did not return in time.
        """
        self._check()
        found: list[_Value] = []
        raised: list[BaseException] = []

        def run() -> None:
            try:
                found.append(call())
            except BaseException as error:  # noqa: BLE001  # raised below, in the calling thread
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
    """Error of a step whose all-reduce shows that the ranks do not run the same program."""


class StepFailureGuard:
    """Context manager around a distributed step: reports an error to the other ranks, or raises theirs.

    Attributes:
        board: the failure reports of the group.
        inits: the number of states initialised on this group.
        second: the guard of the second half of a step, which does not count as another step.
        writer: the single writer of the group's checkpoints.
    """

    def __init__(self, board: RankFailures, steps: int = 1) -> None:
        self.board = board
        self.inits = 0
        self.second = self if steps == 0 else StepFailureGuard(board, 0)
        self.writer = SingleWriter(board.group)
        self._steps = steps

    def __enter__(self) -> None:
        board = self.board
        if board.failure_message:
            board.check()
        board.steps_begun += self._steps
        board.is_in_step = True

    def mark(self, state: int, gradients: int) -> int:
        """Return a small number that is equal on all ranks as long as their programs are."""
        return (self.board.steps_begun * 7919 + state * 104729 + gradients * 1299709) % _MARK_MODULUS

    def refuse(self, state: int, gradients: int) -> None:
        """Raise `PartedError`, with this rank's step, state and gradient count."""
        raise PartedError(f"step {self.board.steps_begun}, of state {state}, with gradients of {gradients} parameters")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.board.is_in_step = False
            return
        if is_collective_error(error):
            raise self._parted(error) from error
        self.board.report_error(error)

    @contextlib.contextmanager
    def collective_call(self, what: str) -> Iterator[None]:
        """Context manager around a collective call other than a step; see `polyamp.rules.collective_barrier`.

        Errors are raised on all ranks anyway, except errors of a collective and errors that end the program."""
        with collective_barrier.collective_call(self.board, what):
            try:
                yield
            except BaseException as error:
                if is_collective_error(error):
                    raise self._parted(error) from error
                if not isinstance(error, Exception):
                    self.board.report_error(error)
                raise

    def _parted(self, error: BaseException) -> ReplicaError:
        return self.board.collective_error(format_error(error, 300).partition(" This is typically caused by ")[0])


def is_collective_error(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, shows that other ranks did not take part in a collective.

    >>> is_collective_error(
    ...     RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:40321")
    ... )
    True
    >>> is_collective_error(ValueError("Connection closed by peer"))
    False
    """
    while error is not None:
        if isinstance(error, dist.DistError | PartedError):
            return True
        if type(error) is RuntimeError and any(word in str(error) for word in _COLLECTIVE_ERROR_WORDS):
            return True
        error = error.__cause__
    return False


def failure_guard_of_group(group: Any) -> StepFailureGuard | None:
    """Return the guard of a process group, creating it once; None for the "fake" backend.

    Raises:
        ReplicaError: the store of the group does not answer.
    """
    for reference, guard in _guards_by_group:
        if reference() is group:
            return guard
    if dist.get_backend(group) == "fake":
        return None
    _guards_by_group[:] = [each for each in _guards_by_group if each[0]() is not None]
    made = _guard_counts[group.group_name] = _guard_counts.get(group.group_name, 0) + 1
    store = TimeoutStore(group.get_group_store(), f"polyamp/{made}/")
    names = dist.get_process_group_ranks(group)
    seconds = group_timeout(group) or datetime.timedelta(minutes=30)
    launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun hosts the store; else rank 0 does
    hosts = dist.get_rank() == 0 and not launched
    ranks = RankGroup(store, dist.get_rank(group), names, seconds.total_seconds())
    try:
        guard = StepFailureGuard(RankFailures(ranks, hosts=hosts))
    except OSError as error:
        raise ReplicaError(lost_store_message(ranks)) from error
    guard.board.linger = guard.writer.is_needed
    _guards_by_group.append((weakref.ref(group), guard))
    return guard


_guards_by_group: Final[list[tuple[Any, StepFailureGuard]]] = []
"""Guards by weak reference to their group. A guard lives as long as its group, so equally long on all ranks."""
_guard_counts: Final[dict[str, int]] = {}
"""Number of groups created under each name. Groups of one name may share a store."""

"""Barrier for calls that need every rank, such as `polyamp.save` of a sharded state (S33).

A collective that only some ranks call is matched with whatever the others send next: it stalls, or the process aborts.
So each rank registers on the store and waits there until all ranks have arrived. A rank that took another path reports
this through its step watchdog, so both sides get the error within seconds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from typing import Final

from polyamp.rules import liveness
from polyamp.rules.failure_report import WATCHDOG_INTERVAL, RankFailures, diverged_ranks_message
from polyamp.rules.rank_comparison import format_ranks

_GRACE_PERIOD: Final = 1.0
"""Seconds to wait for further reports from diverged ranks after the first one."""
_WARN_AFTER: Final = 5.0
"""Seconds of waiting after which a rank logs a warning."""
_LOG: Final = logging.getLogger("polyamp")


@contextlib.contextmanager
def collective_call(board: RankFailures, what: str) -> Iterator[None]:
    """Context manager that is entered once every rank of the group has reached it.

    Args:
        board: this rank's failure report.
        what: the call as users write it: "polyamp.save". The n-th call of one rank matches the n-th of the others.

    Raises:
        ReplicaError: names a rank that is in a later step, raised, ended, was killed, or did not arrive in time.
    """
    board.check()
    board.calls_begun += 1
    board.is_in_step, board.current_call = True, what
    try:
        _CollectiveBarrier(board, what).wait()
        yield
    finally:
        board.is_in_step, board.current_call = False, ""


class _CollectiveBarrier:
    """Barrier of one collective call, under its own keys on the store."""

    def __init__(self, board: RankFailures, what: str) -> None:
        self._board = board
        self._what = what
        self._key = f"meeting/{board.calls_begun}"
        self._size = len(board.group.names)

    def wait(self) -> None:
        board = self._board
        store, me = board.group.store, board.group.place
        here = {"number": board.calls_begun, "place": me, "what": self._what, "step": board.steps_begun}
        try:
            board.set(f"{self._key}/{me}", here)
            board.set("meeting", here)
            if store.add(f"{self._key}/count", 1) == self._size:
                board.set(f"{self._key}/all", here)
                return
            self._wait_for_all()
        except OSError as error:
            raise board.collective_error(f"{type(error).__name__}: {error}") from error

    def _wait_for_all(self) -> None:
        """Return once all ranks have arrived."""
        board, store = self._board, self._board.group.store
        begun = time.monotonic()
        looked = begun
        end, warn = begun + board.group.seconds, begun + _WARN_AFTER
        pause = WATCHDOG_INTERVAL * max(1.0, self._size / 16)  # each poll reads one key per rank
        while store.get(f"{self._key}/all", max(0.0, min(WATCHDOG_INTERVAL, end - time.monotonic()))) is None:
            now = time.monotonic()
            known = self._describe_diverged_ranks() or self._describe_failed_ranks()
            if not known and now - looked > pause:
                looked = now
                known = self._describe_dead_ranks()
            if known:
                raise board.collective_error(f"not every rank came to {self._what}", known)
            if now > end:
                missing = self._missing_ranks()
                names = board.group.format_ranks(missing) if missing else "another rank"
                raise board.collective_error(f"{names} did not come within {board.group.seconds:g} s")
            if now > warn:
                warn = end + 1.0
                names = board.group.format_ranks(self._missing_ranks() or [board.group.place])
                _LOG.warning(
                    "polyamp: rank %d waits in %s for %s. Every rank of this state has to call it; it waits for up to "
                    "%g s.",
                    *(board.group.names[board.group.place], self._what, names, board.group.seconds),
                )

    def _describe_diverged_ranks(self) -> str:
        """Return a sentence that names the ranks that took another path."""
        name = f"{self._key}/elsewhere"
        if not self._board.group.store.add(name, 0):
            return ""
        time.sleep(_GRACE_PERIOD)
        steps: dict[int, list[int]] = {}
        for entry in self._board.entries(name):
            steps.setdefault(int(entry["step"]), []).append(self._board.group.names[entry["place"]])
        there = ", ".join(f"{format_ranks(sorted(ranks))} in step {step}" for step, ranks in sorted(steps.items()))
        here = [place for place in range(self._size) if place not in self._missing_ranks()]
        return diverged_ranks_message(
            [self._board.group.names[place] for place in here], self._what, self._board.steps_begun, there
        )

    def _describe_failed_ranks(self) -> str:
        """Return the reports of ranks that raised or ended."""
        board = self._board
        words = [str(entry["words"]) for name in ("raised", "ended") for entry in board.entries(name)]
        if not words:
            return ""
        me = board.group.names[board.group.place]
        return f"{'; '.join(words)}, and rank {me} is in {self._what}, which every rank has to call."

    def _describe_dead_ranks(self) -> str:
        """Return a sentence that names the killed ranks of this machine."""
        gone = []
        for place in self._missing_ranks():
            value = self._board.group.store.get(f"who/{place}", 0.0)
            if value is not None and liveness.is_process_gone(json.loads(value)):
                gone.append(place)
        if not gone or self._describe_failed_ranks():
            return ""
        verb = "is" if len(gone) == 1 else "are"
        me = self._board.group.names[self._board.group.place]
        return (
            f"{self._board.group.format_ranks(gone)} {verb} no longer running: killed, or ended without a word; "
            f"rank {me} waits for it in {self._what}."
        )

    def _missing_ranks(self) -> list[int]:
        """Return the places that have not registered for this call."""
        store = self._board.group.store
        return [place for place in range(self._size) if store.get(f"{self._key}/{place}", 0.0) is None]

"""Calls that need every rank, such as `polyamp.save` of a sharded state: the ranks meet before anything is sent (S33).

A collective that only some ranks call is paired with whatever the others send next: it stalls, or the process aborts.
So each rank says on the store that it has come, and waits there until all have. A rank whose program went another way
says so by the thread that looks after a step that takes long, and both sides learn of it within seconds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from typing import Final

from polyamp.rules import presence
from polyamp.rules.replicas import called
from polyamp.rules.roll_call import INTERVAL, Board, apart

_GRACE: Final = 1.0
"""Seconds in which the other ranks that are elsewhere say so, once one has."""
_WARN: Final = 5.0
"""Seconds after which a rank that waits says so in its log."""
_LOG: Final = logging.getLogger("polyamp")


@contextlib.contextmanager
def call_of_all(board: Board, what: str) -> Iterator[None]:
    """A block that is entered once every rank of the group has come to it.

    Args:
        board: this rank's.
        what: the call, as users write it: "polyamp.save". The n-th such call of one rank meets the n-th of the others.

    Raises:
        ReplicaError: names a rank that is in a later step, raised, ended, was killed, or did not come in time.
    """
    board.check()
    board.meetings += 1
    board.inside, board.doing = True, what
    try:
        _Meeting(board, what).wait()
        yield
    finally:
        board.inside, board.doing = False, ""


class _Meeting:
    """One such call, by names of its own on the store."""

    def __init__(self, board: Board, what: str) -> None:
        self._board = board
        self._what = what
        self._key = f"meeting/{board.meetings}"
        self._size = len(board.group.names)

    def wait(self) -> None:
        board = self._board
        store, me = board.group.store, board.group.place
        here = {"number": board.meetings, "place": me, "what": self._what, "step": board.begun}
        try:
            board.set(f"{self._key}/{me}", here)
            board.set("meeting", here)
            if store.add(f"{self._key}/count", 1) == self._size:
                board.set(f"{self._key}/all", here)
                return
            self._heard()
        except OSError as error:
            raise board.parted(f"{type(error).__name__}: {error}") from error

    def _heard(self) -> None:
        """Return once all have come."""
        board, store = self._board, self._board.group.store
        begun = time.monotonic()
        looked = begun
        end, warn = begun + board.group.seconds, begun + _WARN
        pause = INTERVAL * max(1.0, self._size / 16)  # a look asks for every rank
        while store.get(f"{self._key}/all", max(0.0, min(INTERVAL, end - time.monotonic()))) is None:
            now = time.monotonic()
            known = self._elsewhere() or self._reported()
            if not known and now - looked > pause:
                looked = now
                known = self._gone()
            if known:
                raise board.parted(f"not every rank came to {self._what}", known)
            if now > end:
                missing = self._missing()
                names = board.group.called(missing) if missing else "another rank"
                raise board.parted(f"{names} did not come within {board.group.seconds:g} s")
            if now > warn:
                warn = end + 1.0
                names = board.group.called(self._missing() or [board.group.place])
                _LOG.warning(
                    "polyamp: rank %d waits in %s for %s. Every rank of this state has to call it; it waits for up to "
                    "%g s.",
                    *(board.group.names[board.group.place], self._what, names, board.group.seconds),
                )

    def _elsewhere(self) -> str:
        """Which ranks went another way, in a sentence."""
        name = f"{self._key}/elsewhere"
        if not self._board.group.store.add(name, 0):
            return ""
        time.sleep(_GRACE)
        steps: dict[int, list[int]] = {}
        for entry in self._board.entries(name):
            steps.setdefault(int(entry["step"]), []).append(self._board.group.names[entry["place"]])
        there = ", ".join(f"{called(sorted(ranks))} in step {step}" for step, ranks in sorted(steps.items()))
        here = [place for place in range(self._size) if place not in self._missing()]
        return apart([self._board.group.names[place] for place in here], self._what, self._board.begun, there)

    def _reported(self) -> str:
        """What ranks said that raised, or ended."""
        board = self._board
        words = [str(entry["words"]) for name in ("raised", "ended") for entry in board.entries(name)]
        if not words:
            return ""
        me = board.group.names[board.group.place]
        return f"{'; '.join(words)}, and rank {me} is in {self._what}, which every rank has to call."

    def _gone(self) -> str:
        """Which ranks of this machine were killed."""
        gone = []
        for place in self._missing():
            value = self._board.group.store.get(f"who/{place}", 0.0)
            if value is not None and presence.is_gone(json.loads(value)):
                gone.append(place)
        if not gone or self._reported():
            return ""
        verb = "is" if len(gone) == 1 else "are"
        me = self._board.group.names[self._board.group.place]
        return (
            f"{self._board.group.called(gone)} {verb} no longer running: killed, or ended without a word; rank {me} "
            f"waits for it in {self._what}."
        )

    def _missing(self) -> list[int]:
        """Places of which nothing was heard at this meeting."""
        store = self._board.group.store
        return [place for place in range(self._size) if store.get(f"{self._key}/{place}", 0.0) is None]

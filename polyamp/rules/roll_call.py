"""What ranks leave for each other where one fails: who raised, who ended, and a roll call of the rest (S32).

An ordinary step writes two attributes of a `Board` and sends nothing. Where a step fails, the rank whose own program
raised says so on the store that the ranks share, before its error goes on; a rank whose collective failed calls the
roll: whoever is there answers, by its own failure or by a small thread that looks after a step that takes long. Who
does not answer was killed, or hangs. The first that calls writes down what was found, so that all say the same.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing.util
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from polyamp.errors import ReplicaError
from polyamp.rules import presence
from polyamp.rules.replicas import Group, called, lost_store, shortened

PATIENCE: Final = 6.0
"""Seconds that a roll call waits for answers."""
INTERVAL: Final = 0.5
"""Seconds between two looks of the thread; with more than 200 ranks it looks less often, for the store's sake."""
_LINGERS: Final = 3.0
"""Seconds that a process which keeps the store stays for the others."""
_MOST: Final = 8
_AGAIN: Final = "Start all ranks again and polyamp.restore the last checkpoint: this state is not to be used again."
_LOG: Final = logging.getLogger("polyamp")


class Board:
    """A group's notices, as one rank sees them.

    Attributes:
        group: the ranks.
        hosts: whether the store ends with this process.
        begun: how many steps this rank began.
        inside: whether it is in one, or in `doing`.
        doing: the call that is no step in which this rank needs the others, such as "polyamp.save"; "" outside.
        meetings: how many of these calls this rank began.
        linger: what a process that keeps the store waits for before it ends, as long as it is true.
        failed: whether a step failed, before it is known why.
        broken: why no step is taken any more; "" as long as nothing failed.
        over: set at the end of the process.
    """

    def __init__(self, group: Group, *, hosts: bool = False) -> None:
        self.group = group
        self.hosts = hosts
        self.begun = 0
        self.inside = False
        self.doing = ""
        self.meetings = 0
        self.linger: Callable[[], bool] = lambda: False
        self.failed = False
        self.broken = ""
        self.over = threading.Event()
        self._thread = threading.get_ident()
        self._since = time.monotonic()
        self._heard = ""
        self._told = False
        self._asked = 0
        self._declined = 0
        self._process = os.getpid()
        self.set(f"who/{group.place}", presence.own())
        multiprocessing.util.Finalize(self, _end, args=(weakref.ref(self),), exitpriority=100)
        _Looking(self).start()

    def check(self) -> None:
        """Refuse a step after one that failed.

        Raises:
            ReplicaError: what failed.
        """
        if self.broken:
            raise ReplicaError(f"{self.broken} {_AGAIN}")

    def raised(self, error: BaseException) -> None:
        """Say that this rank's own program raised in a step; its error goes on as it is, with a note."""
        self.failed = True
        ranks, me = len(self.group.names), self.group.names[self.group.place]
        told = f"rank {me} raised {shortened(error)} in {self.at()}"
        self.broken = f"{told}."
        try:
            self.group.store.reach()
            self.put("raised", {"words": told})
            self.set("called", {"words": told})
            self._told = True
        except OSError:  # the launcher is gone: nobody can be told, and the error is on its way
            return
        error.add_note(
            f"polyamp: this is rank {me} of {ranks}, in {self.at()}. The other ranks end with ReplicaError, "
            "which says so. This state is not to be used again."
        )

    def at(self) -> str:
        """Where this rank is: "step 4", or "polyamp.save after step 4"."""
        return f"{self.doing} after step {self.begun}" if self.doing else f"step {self.begun}"

    def parted(self, what: str, known: str = "") -> ReplicaError:
        """The error of a rank whose collective failed, which is to be raised from that failure.

        Takes up to `PATIENCE` seconds, which only a rank that does not answer costs.

        Args:
            what: the failure, in one line.
            known: who it was, in a sentence, where that needs no roll call.
        """
        self.failed = True
        me = self.group.names[self.group.place]
        try:
            self.group.store.reach()
            self.put("answers", {"place": self.group.place, "how": "failed", "step": self.begun, "error": what})
            self.set("called", {"words": known.removesuffix(".")})
            self._told, self._asked = bool(known), 1
            words = self._found(known)
        except OSError:
            words = known or self._heard or lost_store(self.group)
        failed = f" (The collective of rank {me} failed in {self.at()}: {what})"
        self.broken = words if known else words + failed
        whole = "The last complete checkpoint is whole. " if self.doing else ""
        return ReplicaError(f"{self.broken} {whole}{_AGAIN}")

    def ended(self) -> None:
        """Say that this rank's program is over. Called when the process ends in a way of which it hears.

        Where the store ends with this process, a rank that raised waits until the others have heard of it.
        """
        if self._process != os.getpid():
            return
        end = time.monotonic() + _LINGERS
        with contextlib.suppress(OSError):
            while self.hosts and (self._told or self.linger()) and time.monotonic() < end:
                heard = self.group.store.add("answers", 0) + self.group.store.add("ended", 0) - self._asked
                if self._told and heard >= len(self.group.names) - 1:
                    return
                time.sleep(0.05)
        if self.broken:
            return
        error = getattr(sys, "last_value", None)  # what ended the program, where nobody caught it
        why = "" if error is None else f": its program raised {shortened(error)} outside of a step"
        self.broken = f"rank {self.group.names[self.group.place]} ended after step {self.begun}{why}."
        with contextlib.suppress(OSError):
            self.group.store.reach()
            self.put("ended", {"place": self.group.place, "words": self.broken[:-1]})

    def answer(self) -> bool:
        """If the roll was called, say where this rank is. Called by the thread that looks after a long step."""
        self.group.store.reach()
        self._decline()
        value = self.group.store.get("called", 0.0)
        if value is None:
            return False
        if self.failed:  # and says so itself
            return True
        words = str(json.loads(value)["words"])
        self._heard = f"{words}." if words else self._heard
        here = {"place": self.group.place, "how": "there", "step": self.begun, "inside": self.inside, "at": self.at()}
        seconds = time.monotonic() - self._since
        self.put("answers", {**here, "seconds": round(seconds), "where": presence.where(self._thread)})
        if words and self.inside:
            _LOG.warning(
                "polyamp: %s. Rank %d waits for it in a collective, for up to %g s.",
                *(words, self.group.names[self.group.place], self.group.seconds),
            )
        return True

    def stands_still(self, seen: tuple[int, bool]) -> bool:
        """Whether nothing moved since the last look, at which `(begun, inside)` was this."""
        if (self.begun, self.inside) == seen:
            return True
        self._since = time.monotonic()
        return False

    def _decline(self) -> None:
        """Say so where others wait for this rank in a call that its program has passed by: it is in a later step."""
        value = self.group.store.get("meeting", 0.0)
        if value is None:
            return
        said = json.loads(value)
        if said["number"] <= max(self.meetings, self._declined) or self.begun <= said["step"]:
            return
        self._declined = said["number"]
        self.put(f"meeting/{said['number']}/elsewhere", {"place": self.group.place, "step": self.begun})
        there = f"rank {self.group.names[self.group.place]} in step {self.begun}"
        self._heard = apart([self.group.names[said["place"]]], said["what"], said["step"], there)

    def _found(self, known: str = "") -> str:
        """Who is missing; by the first who calls the roll, and from it for the others."""
        if self.group.store.add("callers", 1) != 1:
            value = self.group.store.get("found", PATIENCE + 2 * INTERVAL)
            if value is not None:
                return str(json.loads(value)["words"])
        words = known or self._called()
        self.set("found", {"words": words})
        return words

    def _called(self) -> str:
        """Wait for the answers of all, or for one that tells what happened."""
        end = time.monotonic() + PATIENCE
        who: dict[int, Mapping[str, Any]] = {}
        while True:
            raised, ended, answers = (list(self.entries(name)) for name in ("raised", "ended", "answers"))
            there = {int(entry["place"]) for entry in (*ended, *answers)}
            missing = [place for place in range(len(self.group.names)) if place not in there]
            for place in missing:
                if place not in who and (value := self.group.store.get(f"who/{place}", 0.0)) is not None:
                    who[place] = json.loads(value)
            gone = [place for place in missing if place in who and presence.is_gone(who[place])]
            failed = [entry for entry in answers if entry["how"] == "failed"]  # more than what its thread may have said
            later = {int(entry["place"]): entry for entry in (*answers, *failed)}.values()
            open_ = [entry["inside"] for entry in later if entry["how"] == "there"]
            settled = len(gone) == len(missing) and (gone or ended or not open_ or not all(open_))
            if raised or settled or time.monotonic() > end:
                silent = [place for place in missing if place not in gone]
                return self._words(raised, ended, gone, silent, list(later))
            time.sleep(0.05)

    def _words(
        self,
        raised: list[Mapping[str, Any]],
        ended: list[Mapping[str, Any]],
        gone: list[int],
        silent: list[int],
        answers: list[Mapping[str, Any]],
    ) -> str:
        if raised or ended:
            return f"{'; '.join(str(entry['words']) for entry in (*raised, *ended))}."
        said = []
        if gone:
            verb = "is" if len(gone) == 1 else "are"
            said.append(f"{self.group.called(gone)} {verb} no longer running: killed, or ended without a word.")
        if silent:
            what = (
                "it was killed, hangs, or its machine is lost"
                if len(silent) == 1
                else ("they were killed, hang, or their machines are lost")
            )
            said.append(f"{self.group.called(silent)} did not answer within {PATIENCE:g} s: {what}.")
        return " ".join(said) or self._suspected(answers)

    def _suspected(self, answers: list[Mapping[str, Any]]) -> str:
        """All are there: who has not come, or is in another step than the others."""
        steps = [int(entry["step"]) for entry in answers]
        step = max(dict.fromkeys(steps), key=steps.count)
        there = [entry for entry in answers if entry["how"] == "there"]
        outside = [entry for entry in there if not entry["inside"]]
        said: list[str] = []
        for entry in outside or there:
            last = f"has not come back since step {entry['step']}"
            verb = f"is still in {entry['at']}" if entry["inside"] else last
            at = f", at {entry['where']}" if entry["where"] else ""
            rank = self.group.names[entry["place"]]
            said.append(f"rank {rank} hangs: it {verb}, for {entry['seconds']} s{at}.")
        if said:
            return " ".join(said[:_MOST])
        other = sorted(self.group.names[entry["place"]] for entry in answers if entry["step"] != step)
        if other:
            return f"{called(other)} took another number of steps than the others, who are in step {step}."
        errors = [str(entry["error"]) for entry in answers]
        usual = max(dict.fromkeys(errors), key=errors.count)
        if 2 * errors.count(usual) > len(errors) > errors.count(usual):
            odd = [entry for entry in answers if entry["error"] != usual]
            ranks = called(sorted(self.group.names[entry["place"]] for entry in odd))
            return f"{ranks} parted from the others in step {step}: {odd[0]['error']} there, {usual} on the others."
        listed = "; ".join(f"rank {self.group.names[entry['place']]}: {entry['error']}" for entry in answers[:_MOST])
        return f"All ranks answer, and on each a collective failed in step {step}: {listed}."

    def put(self, name: str, what: Mapping[str, Any]) -> None:
        """Add an entry under a name."""
        self.set(f"{name}/{self.group.store.add(name, 1)}", what)

    def entries(self, name: str) -> Iterator[Mapping[str, Any]]:
        """Every entry under a name."""
        for number in range(1, self.group.store.add(name, 0) + 1):
            value = self.group.store.get(f"{name}/{number}", 1.0)
            if value is not None:
                yield json.loads(value)

    def set(self, key: str, what: Mapping[str, Any]) -> None:
        """Put a value."""
        self.group.store.set(key, json.dumps(what).encode())


def apart(ranks: Sequence[int], what: str, step: int, others: str) -> str:
    """The sentences about ranks that are in a call of all, and others that went another way.

    Args:
        ranks: who is in it.
        what: the call.
        step: the last that they began.
        others: who is where.
    """
    verb = "is" if len(ranks) == 1 else "are"
    return (
        f"{called(ranks)} {verb} in {what} after step {step}, and {others}. Every rank has to call {what} of a state "
        "that lies in several processes."
    )


class _Looking(threading.Thread):
    """Looks every half second whether steps go on, and asks the store only where one does not."""

    def __init__(self, board: Board) -> None:
        super().__init__(name="polyamp-roll-call", daemon=True)
        self._board = weakref.ref(board)
        self._over = board.over
        self._pause = INTERVAL * max(1.0, len(board.group.names) / 200)

    def run(self) -> None:
        seen = (-1, False)
        while not self._over.wait(self._pause):
            board = self._board()
            if board is None or board.failed:
                return
            if board.stands_still(seen):
                try:
                    if board.answer():
                        return
                except OSError:  # the launcher is gone, and with it whoever could ask
                    return
            seen = (board.begun, board.inside)
            del board


class Shelf:
    """A `Store` in one process, whose threads are the ranks: for tests and examples.

    Example:
        >>> shelf = Shelf()
        >>> shelf.set("a", b"1")
        >>> shelf.get("a", 0.0), shelf.get("b", 0.0), shelf.add("c", 2)
        (b'1', None, 2)
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._counts: dict[str, int] = {}
        self._changed = threading.Condition()

    def reach(self) -> None:
        """See `Store`."""

    def set(self, key: str, value: bytes) -> None:
        """See `Store`."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, seconds: float) -> bytes | None:
        """See `Store`."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, seconds)
            return self._values.get(key)

    def add(self, key: str, number: int) -> int:
        """See `Store`."""
        with self._changed:
            self._counts[key] = self._counts.get(key, 0) + number
            return self._counts[key]


def _end(found: weakref.ref[Board]) -> None:
    """The end of the process: multiprocessing calls it in the children that it started, and in every other process."""
    board = found()
    if board is not None:
        board.over.set()
        board.ended()

"""Failure reports that ranks leave for each other: which rank raised, which ended, and a roll call of the rest (S32).

An ordinary step writes two attributes of a `RankFailures` and sends nothing. If a step fails:

- A rank whose own program raised reports this on the shared store before its error propagates.
- A rank whose collective failed calls the roll. Ranks answer by their own failure, or through their step watchdog.
- A rank that does not answer was killed or hangs. The first caller stores the result, so all ranks report the same.
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
from polyamp.rules import liveness
from polyamp.rules.rank_comparison import RankGroup, format_error, format_ranks, lost_store_message

ROLL_CALL_TIMEOUT: Final = 6.0
"""Seconds that a roll call waits for answers."""
WATCHDOG_INTERVAL: Final = 0.5
"""Seconds between two checks of the watchdog; longer with more than 200 ranks, to limit the load on the store."""
_LINGER_TIMEOUT: Final = 3.0
"""Seconds that the process which hosts the store stays alive for the other ranks."""
_MAX_LISTED: Final = 8
_RESTART_HINT: Final = (
    "Start all ranks again and polyamp.restore the last checkpoint: this state is not to be used again."
)
_LOG: Final = logging.getLogger("polyamp")


class RankFailures:
    """Failure reports of a group, as seen by one rank.

    Attributes:
        group: the ranks.
        hosts: whether the store ends with this process.
        steps_begun: number of steps that this rank began.
        is_in_step: whether the rank is in a step, or in `current_call`.
        current_call: the collective call outside of steps that is running, such as "polyamp.save"; "" if none.
        calls_begun: number of such calls that this rank began.
        linger: the process that hosts the store does not end while this returns True.
        failed: whether a step failed, before the reason is known.
        failure_message: why no further step is taken; "" as long as nothing failed.
        exit_event: set at the end of the process.
    """

    def __init__(self, group: RankGroup, *, hosts: bool = False) -> None:
        self.group = group
        self.hosts = hosts
        self.steps_begun = 0
        self.is_in_step = False
        self.current_call = ""
        self.calls_begun = 0
        self.linger: Callable[[], bool] = lambda: False
        self.failed = False
        self.failure_message = ""
        self.exit_event = threading.Event()
        self._thread = threading.get_ident()
        self._since = time.monotonic()
        self._known_failure = ""
        self._is_reported = False
        self._own_answers = 0
        self._declined_call = 0
        self._process = os.getpid()
        self.set(f"who/{group.place}", liveness.process_identity())
        multiprocessing.util.Finalize(self, _report_exit, args=(weakref.ref(self),), exitpriority=100)
        _StepWatchdog(self).start()

    def check(self) -> None:
        """Raise if an earlier step failed.

        Raises:
            ReplicaError: names what failed.
        """
        if self.failure_message:
            raise ReplicaError(f"{self.failure_message} {_RESTART_HINT}")

    def report_error(self, error: BaseException) -> None:
        """Report that this rank's own program raised in a step. The error propagates unchanged, with a note."""
        self.failed = True
        ranks, me = len(self.group.names), self.group.names[self.group.place]
        told = f"rank {me} raised {format_error(error)} in {self.describe_position()}"
        self.failure_message = f"{told}."
        try:
            self.group.store.reach()
            self.put("raised", {"words": told})
            self.set("called", {"words": told})
            self._is_reported = True
        except OSError:  # the launcher is gone: no report is possible, and the error propagates anyway
            return
        error.add_note(
            f"polyamp: this is rank {me} of {ranks}, in {self.describe_position()}. The other ranks end with "
            "ReplicaError, which says so. This state is not to be used again."
        )

    def describe_position(self) -> str:
        """Return the position of this rank: "step 4", or "polyamp.save after step 4"."""
        return f"{self.current_call} after step {self.steps_begun}" if self.current_call else f"step {self.steps_begun}"

    def collective_error(self, what: str, known: str = "") -> ReplicaError:
        """Return the error of a rank whose collective failed, to be raised from that failure.

        Takes up to `ROLL_CALL_TIMEOUT` seconds, but only if a rank does not answer.

        Args:
            what: the failure, in one line.
            known: a sentence that names the cause, if no roll call is needed.
        """
        self.failed = True
        me = self.group.names[self.group.place]
        try:
            self.group.store.reach()
            self.put("answers", {"place": self.group.place, "how": "failed", "step": self.steps_begun, "error": what})
            self.set("called", {"words": known.removesuffix(".")})
            self._is_reported, self._own_answers = bool(known), 1
            words = self._find_missing(known)
        except OSError:
            words = known or self._known_failure or lost_store_message(self.group)
        failed = f" (The collective of rank {me} failed in {self.describe_position()}: {what})"
        self.failure_message = words if known else words + failed
        whole = "The last complete checkpoint is whole. " if self.current_call else ""
        return ReplicaError(f"{self.failure_message} {whole}{_RESTART_HINT}")

    def report_exit(self) -> None:
        """Report that this rank's program ended. Runs at process exit where Python gets control.

        If the store ends with this process, a rank that raised waits until the others have read its report.
        """
        if self._process != os.getpid():
            return
        end = time.monotonic() + _LINGER_TIMEOUT
        with contextlib.suppress(OSError):
            while self.hosts and (self._is_reported or self.linger()) and time.monotonic() < end:
                heard = self.group.store.add("answers", 0) + self.group.store.add("ended", 0) - self._own_answers
                if self._is_reported and heard >= len(self.group.names) - 1:
                    return
                time.sleep(0.05)
        if self.failure_message:
            return
        error = getattr(sys, "last_value", None)  # the uncaught exception that ended the program
        why = "" if error is None else f": its program raised {format_error(error)} outside of a step"
        self.failure_message = f"rank {self.group.names[self.group.place]} ended after step {self.steps_begun}{why}."
        with contextlib.suppress(OSError):
            self.group.store.reach()
            self.put("ended", {"place": self.group.place, "words": self.failure_message[:-1]})

    def answer_roll_call(self) -> bool:
        """Answer a pending roll call with this rank's position. The step watchdog calls it during a long step."""
        self.group.store.reach()
        self._decline()
        value = self.group.store.get("called", 0.0)
        if value is None:
            return False
        if self.failed:  # this rank reports its failure itself
            return True
        words = str(json.loads(value)["words"])
        self._known_failure = f"{words}." if words else self._known_failure
        here = {
            "place": self.group.place,
            "how": "there",
            "step": self.steps_begun,
            "inside": self.is_in_step,
            "at": self.describe_position(),
        }
        seconds = time.monotonic() - self._since
        self.put("answers", {**here, "seconds": round(seconds), "where": liveness.user_code_location(self._thread)})
        if words and self.is_in_step:
            _LOG.warning(
                "polyamp: %s. Rank %d waits for it in a collective, for up to %g s.",
                *(words, self.group.names[self.group.place], self.group.seconds),
            )
        return True

    def has_stalled(self, seen: tuple[int, bool]) -> bool:
        """Whether `(steps_begun, is_in_step)` still equals `seen`, its value at the last check."""
        if (self.steps_begun, self.is_in_step) == seen:
            return True
        self._since = time.monotonic()
        return False

    def _decline(self) -> None:
        """Report that this rank is in a later step, if others wait for it in a call that its program skipped."""
        value = self.group.store.get("meeting", 0.0)
        if value is None:
            return
        said = json.loads(value)
        if said["number"] <= max(self.calls_begun, self._declined_call) or self.steps_begun <= said["step"]:
            return
        self._declined_call = said["number"]
        self.put(f"meeting/{said['number']}/elsewhere", {"place": self.group.place, "step": self.steps_begun})
        there = f"rank {self.group.names[self.group.place]} in step {self.steps_begun}"
        self._known_failure = diverged_ranks_message(
            [self.group.names[said["place"]]], said["what"], said["step"], there
        )

    def _find_missing(self, known: str = "") -> str:
        """Return who is missing. The first caller calls the roll, and the others read its result."""
        if self.group.store.add("callers", 1) != 1:
            value = self.group.store.get("found", ROLL_CALL_TIMEOUT + 2 * WATCHDOG_INTERVAL)
            if value is not None:
                return str(json.loads(value)["words"])
        words = known or self._call_roll()
        self.set("found", {"words": words})
        return words

    def _call_roll(self) -> str:
        """Wait for the answers of all ranks, or for one that explains the failure."""
        end = time.monotonic() + ROLL_CALL_TIMEOUT
        who: dict[int, Mapping[str, Any]] = {}
        while True:
            raised, ended, answers = (list(self.entries(name)) for name in ("raised", "ended", "answers"))
            there = {int(entry["place"]) for entry in (*ended, *answers)}
            missing = [place for place in range(len(self.group.names)) if place not in there]
            for place in missing:
                if place not in who and (value := self.group.store.get(f"who/{place}", 0.0)) is not None:
                    who[place] = json.loads(value)
            gone = [place for place in missing if place in who and liveness.is_process_gone(who[place])]
            failed = [entry for entry in answers if entry["how"] == "failed"]  # overrides the watchdog's answer
            later = {int(entry["place"]): entry for entry in (*answers, *failed)}.values()
            open_ = [entry["inside"] for entry in later if entry["how"] == "there"]
            settled = len(gone) == len(missing) and (gone or ended or not open_ or not all(open_))
            if raised or settled or time.monotonic() > end:
                silent = [place for place in missing if place not in gone]
                return self._compose_failure_message(raised, ended, gone, silent, list(later))
            time.sleep(0.05)

    def _compose_failure_message(
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
            said.append(f"{self.group.format_ranks(gone)} {verb} no longer running: killed, or ended without a word.")
        if silent:
            what = (
                "it was killed, hangs, or its machine is lost"
                if len(silent) == 1
                else ("they were killed, hang, or their machines are lost")
            )
            said.append(f"{self.group.format_ranks(silent)} did not answer within {ROLL_CALL_TIMEOUT:g} s: {what}.")
        return " ".join(said) or self._hang_message(answers)

    def _hang_message(self, answers: list[Mapping[str, Any]]) -> str:
        """Return the message for a roll call that all ranks answered: who is late, or in another step."""
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
            return " ".join(said[:_MAX_LISTED])
        other = sorted(self.group.names[entry["place"]] for entry in answers if entry["step"] != step)
        if other:
            return f"{format_ranks(other)} took another number of steps than the others, who are in step {step}."
        errors = [str(entry["error"]) for entry in answers]
        usual = max(dict.fromkeys(errors), key=errors.count)
        if 2 * errors.count(usual) > len(errors) > errors.count(usual):
            odd = [entry for entry in answers if entry["error"] != usual]
            ranks = format_ranks(sorted(self.group.names[entry["place"]] for entry in odd))
            return f"{ranks} parted from the others in step {step}: {odd[0]['error']} there, {usual} on the others."
        listed = "; ".join(
            f"rank {self.group.names[entry['place']]}: {entry['error']}" for entry in answers[:_MAX_LISTED]
        )
        return f"All ranks answer, and on each a collective failed in step {step}: {listed}."

    def put(self, name: str, what: Mapping[str, Any]) -> None:
        """Append an entry under a name."""
        self.set(f"{name}/{self.group.store.add(name, 1)}", what)

    def entries(self, name: str) -> Iterator[Mapping[str, Any]]:
        """Iterate over the entries under a name."""
        for number in range(1, self.group.store.add(name, 0) + 1):
            value = self.group.store.get(f"{name}/{number}", 1.0)
            if value is not None:
                yield json.loads(value)

    def set(self, key: str, what: Mapping[str, Any]) -> None:
        """Store a value."""
        self.group.store.set(key, json.dumps(what).encode())


def diverged_ranks_message(ranks: Sequence[int], what: str, step: int, others: str) -> str:
    """Return the sentences for ranks in a collective call while others took another path.

    Args:
        ranks: the ranks in the call.
        what: the call.
        step: the last step that they began.
        others: where the other ranks are.
    """
    verb = "is" if len(ranks) == 1 else "are"
    return (
        f"{format_ranks(ranks)} {verb} in {what} after step {step}, and {others}. Every rank has to call {what} of a "
        "state that lies in several processes."
    )


class _StepWatchdog(threading.Thread):
    """Thread that checks every half second whether steps advance. It reads the store only if they do not."""

    def __init__(self, board: RankFailures) -> None:
        super().__init__(name="polyamp-roll-call", daemon=True)
        self._board = weakref.ref(board)
        self._over = board.exit_event
        self._pause = WATCHDOG_INTERVAL * max(1.0, len(board.group.names) / 200)

    def run(self) -> None:
        seen = (-1, False)
        while not self._over.wait(self._pause):
            board = self._board()
            if board is None or board.failed:
                return
            if board.has_stalled(seen):
                try:
                    if board.answer_roll_call():
                        return
                except OSError:  # the launcher is gone, so nobody can call the roll
                    return
            seen = (board.steps_begun, board.is_in_step)
            del board


class InMemoryStore:
    """`RankStore` within one process whose threads are the ranks, for tests and examples.

    Example:
        >>> shelf = InMemoryStore()
        >>> shelf.set("a", b"1")
        >>> shelf.get("a", 0.0), shelf.get("b", 0.0), shelf.add("c", 2)
        (b'1', None, 2)
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._counts: dict[str, int] = {}
        self._changed = threading.Condition()

    def reach(self) -> None:
        """See `RankStore`."""

    def set(self, key: str, value: bytes) -> None:
        """See `RankStore`."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, seconds: float) -> bytes | None:
        """See `RankStore`."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, seconds)
            return self._values.get(key)

    def add(self, key: str, number: int) -> int:
        """See `RankStore`."""
        with self._changed:
            self._counts[key] = self._counts.get(key, 0) + number
            return self._counts[key]


def _report_exit(found: weakref.ref[RankFailures]) -> None:
    """Report the exit of the process, through a multiprocessing finalizer; also in children that it started."""
    board = found()
    if board is not None:
        board.exit_event.set()
        board.report_exit()

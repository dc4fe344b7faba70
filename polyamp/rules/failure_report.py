"""Failure reports that ranks leave for each other: which rank raised or ended, and each rank's position (S32).

An ordinary step writes two attributes of a `RankFailures` and sends nothing. If a step fails:

- A rank whose own program raised reports this on the shared store before its error propagates.
- A rank whose collective failed calls the roll. Ranks answer by their own failure, or through their step watchdog.
- A rank that does not answer was killed or hangs. The first caller stores the result, so all ranks report the same.

Reports are lists on the store, each entry with the `rank` in the group and its `step`:

- "raised" and "ended": `message`.
- "answers": `error`, that of the rank's own collective, with its `cause` if the rank knows it; or, from a rank that did
  not fail, whether it is `inside` a step, its `position`, and the `location` of its program for how many `seconds`.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.util
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from polyamp.errors import ReplicaError
from polyamp.rules import liveness
from polyamp.rules.rank_group import (
    MAX_LISTED,
    RankGroup,
    dead_ranks_message,
    format_error,
    format_ranks,
    lost_store_message,
)

WATCHDOG_INTERVAL: Final = 0.5
"""Seconds between two checks of the watchdog; longer with more than 200 ranks, to limit the load on the store."""
_LINGER_TIMEOUT: Final = 3.0
"""Seconds that the process which hosts the store stays alive for the other ranks."""
_RESTART_HINT: Final = (
    "Start all ranks again and polyamp.restore the last checkpoint: this state is not to be used again."
)
_LOG: Final = logging.getLogger("polyamp")
ROLL_CALL_TIMEOUT: Final = 6.0
"""Seconds that a roll call waits for answers."""
_POLL_INTERVAL: Final = 0.05

_Entry = Mapping[str, Any]


def call_roll(group: RankGroup) -> str:
    """Wait for the answers of all ranks, or for one that explains the failure, and return the message."""
    end = time.monotonic() + ROLL_CALL_TIMEOUT
    processes: dict[int, Any] = {}
    while True:
        raised, ended, answers = (list(group.entries(name)) for name in ("raised", "ended", "answers"))
        heard = {int(entry["rank"]) for entry in (*ended, *answers)}
        missing = [rank for rank in range(group.size) if rank not in heard]
        dead = find_dead_ranks(group, missing, processes)
        failed = [entry for entry in answers if "error" in entry]  # overrides the watchdog's answer
        causes = [str(entry["cause"]) for entry in failed if entry["cause"]]
        latest = {int(entry["rank"]): entry for entry in (*answers, *failed)}.values()
        inside = [entry["inside"] for entry in latest if "error" not in entry]
        is_explained = len(dead) == len(missing) and (dead or ended or not inside or not all(inside))
        if raised or causes or is_explained or time.monotonic() > end:
            if raised or ended:
                return f"{'; '.join(str(entry['message']) for entry in (*raised, *ended))}."
            if causes:
                return causes[0]
            silent = [rank for rank in missing if rank not in dead]
            return _absence_message(group, dead, silent) or _hang_message(group, list(latest))
        time.sleep(_POLL_INTERVAL)


def find_dead_ranks(group: RankGroup, ranks: Sequence[int], processes: dict[int, Any]) -> list[int]:
    """Return which of the ranks' processes are gone, as far as this machine shows.

    Args:
        group: the ranks.
        ranks: those to look at.
        processes: identities of their processes, read from the store at the first call.
    """
    for rank in ranks:
        if processes.get(rank) is None:
            processes[rank] = group.read(f"who/{rank}")
    return [rank for rank in ranks if processes[rank] is not None and liveness.is_process_gone(processes[rank])]


def _absence_message(group: RankGroup, dead: Sequence[int], silent: Sequence[int]) -> str:
    """Return the message for ranks that did not answer; "" for none."""
    sentences = []
    if dead:
        sentences.append(f"{dead_ranks_message([group.global_ranks[rank] for rank in dead])}.")
    if silent:
        reason = "it was killed, hangs, or its machine is lost"
        if len(silent) > 1:
            reason = "they were killed, hang, or their machines are lost"
        sentences.append(f"{group.format_ranks(silent)} did not answer within {ROLL_CALL_TIMEOUT:g} s: {reason}.")
    return " ".join(sentences)


def _hang_message(group: RankGroup, answers: Sequence[_Entry]) -> str:
    """Return the message for a roll call that all ranks answered: who is late, or in another step."""
    waiting = [entry for entry in answers if "error" not in entry]
    late = [entry for entry in waiting if not entry["inside"]] or waiting
    if late:
        return " ".join(_late_rank_sentence(group, entry) for entry in late[:MAX_LISTED])
    steps = [int(entry["step"]) for entry in answers]
    step = max(dict.fromkeys(steps), key=steps.count)
    other = sorted(int(entry["rank"]) for entry in answers if entry["step"] != step)
    if other:
        return f"{group.format_ranks(other)} took another number of steps than the others, who are in step {step}."
    errors = [str(entry["error"]) for entry in answers]
    usual = max(dict.fromkeys(errors), key=errors.count)
    if 2 * errors.count(usual) > len(errors) > errors.count(usual):
        odd = [entry for entry in answers if entry["error"] != usual]
        ranks = group.format_ranks(sorted(int(entry["rank"]) for entry in odd))
        return f"{ranks} parted from the others in step {step}: {odd[0]['error']} there, {usual} on the others."
    listed = "; ".join(f"{group.format_ranks([entry['rank']])}: {entry['error']}" for entry in answers[:MAX_LISTED])
    return f"All ranks answer, and on each a collective failed in step {step}: {listed}."


def _late_rank_sentence(group: RankGroup, entry: _Entry) -> str:
    verb = f"is still in {entry['position']}" if entry["inside"] else f"has not come back since step {entry['step']}"
    where = f", at {entry['location']}" if entry["location"] else ""
    return f"{group.format_ranks([entry['rank']])} hangs: it {verb}, for {entry['seconds']} s{where}."


def diverged_ranks_message(ranks: Sequence[int], call: str, step: int, others: str) -> str:
    """Return the sentences for ranks in a collective call while others took another path.

    Args:
        ranks: the ranks in the call.
        call: the call.
        step: the last step that they began.
        others: where the other ranks are.
    """
    verb = "is" if len(ranks) == 1 else "are"
    return (
        f"{format_ranks(ranks)} {verb} in {call} after step {step}, and {others}. Every rank has to call {call} of a "
        "state that lies in several processes."
    )


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
        self._stalled_since = time.monotonic()
        self._known_failure = ""
        self._is_reported = False
        self._own_answers = 0
        self._declined_call = 0
        self._process = os.getpid()
        group.write(f"who/{group.rank}", liveness.process_identity())
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
        group, rank, position = self.group, self.group.global_rank, self.describe_position()
        message = f"rank {rank} raised {format_error(error)} in {position}"
        self.failure_message = f"{message}."
        try:
            group.store.reach()
            group.append("raised", {"message": message})
            group.write("called", {"message": message})
            self._is_reported = True
        except OSError:  # the launcher is gone: no report is possible, and the error propagates anyway
            return
        error.add_note(
            f"polyamp: this is rank {rank} of {group.size}, in {position}. The other ranks end with ReplicaError, "
            "which says so. This state is not to be used again."
        )

    def describe_position(self) -> str:
        """Return the position of this rank: "step 4", or "polyamp.save after step 4"."""
        return f"{self.current_call} after step {self.steps_begun}" if self.current_call else f"step {self.steps_begun}"

    def collective_error(self, failure: str, known: str = "") -> ReplicaError:
        """Return the error of a rank whose collective failed, to be raised from that failure.

        Takes up to `ROLL_CALL_TIMEOUT` seconds, but only if a rank does not answer.

        Args:
            failure: the failure, in one line.
            known: a sentence that names the cause, if no roll call is needed.
        """
        self.failed = True
        group, position = self.group, self.describe_position()
        try:
            group.store.reach()
            group.append("answers", {"rank": group.rank, "step": self.steps_begun, "error": failure, "cause": known})
            group.write("called", {"message": known.removesuffix(".")})
            self._is_reported, self._own_answers = bool(known), 1
            message = self._find_cause(known)
        except OSError:
            message = known or self._known_failure or lost_store_message(group)
        if not known:
            message += f" (The collective of rank {group.global_rank} failed in {position}: {failure})"
        self.failure_message = message
        whole = "The last complete checkpoint is whole. " if self.current_call else ""
        return ReplicaError(f"{message} {whole}{_RESTART_HINT}")

    def report_exit(self) -> None:
        """Report that this rank's program ended. Runs at process exit where Python gets control.

        If the store ends with this process, a rank that raised waits until the others have read its report.
        """
        if self._process != os.getpid():
            return
        store, end = self.group.store, time.monotonic() + _LINGER_TIMEOUT
        with contextlib.suppress(OSError):
            while self.hosts and (self._is_reported or self.linger()) and time.monotonic() < end:
                answers = store.add("answers", 0) + store.add("ended", 0) - self._own_answers
                if self._is_reported and answers >= self.group.size - 1:
                    return
                time.sleep(0.05)
        if self.failure_message:
            return
        error = getattr(sys, "last_value", None)  # the uncaught exception that ended the program
        why = "" if error is None else f": its program raised {format_error(error)} outside of a step"
        message = f"rank {self.group.global_rank} ended after step {self.steps_begun}{why}"
        self.failure_message = f"{message}."
        with contextlib.suppress(OSError):
            store.reach()
            self.group.append("ended", {"rank": self.group.rank, "message": message})

    def answer_roll_call(self) -> bool:
        """Answer a pending roll call with this rank's position. The step watchdog calls it during a long step."""
        group = self.group
        group.store.reach()
        self._decline_call()
        call = group.read("called")
        if call is None:
            return False
        if self.failed:  # this rank reports its failure itself
            return True
        message = str(call["message"])
        if message:
            self._known_failure = f"{message}."
        answer = {
            "rank": group.rank,
            "step": self.steps_begun,
            "inside": self.is_in_step,
            "position": self.describe_position(),
            "location": liveness.user_code_location(self._thread),
            "seconds": round(time.monotonic() - self._stalled_since),
        }
        group.append("answers", answer)
        if message and self.is_in_step:
            _LOG.warning(
                "polyamp: %s. Rank %d waits for it in a collective, for up to %g s.",
                *(message, group.global_rank, group.seconds),
            )
        return True

    def has_stalled(self, position: tuple[int, bool]) -> bool:
        """Whether `(steps_begun, is_in_step)` still equals `position`, its value at the last check."""
        if (self.steps_begun, self.is_in_step) == position:
            return True
        self._stalled_since = time.monotonic()
        return False

    def _decline_call(self) -> None:
        """Report that this rank is in a later step, if others wait for it in a call that its program skipped."""
        group = self.group
        call = group.read("meeting")
        if call is None or call["number"] <= max(self.calls_begun, self._declined_call):
            return
        if self.steps_begun <= call["step"]:
            return
        self._declined_call = call["number"]
        group.append(f"meeting/{call['number']}/elsewhere", {"rank": group.rank, "step": self.steps_begun})
        here = f"rank {group.global_rank} in step {self.steps_begun}"
        self._known_failure = diverged_ranks_message(
            [group.global_ranks[call["rank"]]], call["call"], call["step"], here
        )

    def _find_cause(self, known: str) -> str:
        """Return the cause of the failure. The first caller calls the roll, and the others read its result."""
        if self.group.store.add("callers", 1) != 1:
            result = self.group.read("found", ROLL_CALL_TIMEOUT + 2 * WATCHDOG_INTERVAL)
            if result is not None:
                return str(result["message"])
        message = known or call_roll(self.group)
        self.group.write("found", {"message": message})
        return message


class _StepWatchdog(threading.Thread):
    """Thread that checks every half second whether steps advance. It reads the store only if they do not."""

    def __init__(self, failures: RankFailures) -> None:
        super().__init__(name="polyamp-roll-call", daemon=True)
        self._failures = weakref.ref(failures)
        self._exit_event = failures.exit_event
        self._interval = WATCHDOG_INTERVAL * max(1.0, failures.group.size / 200)

    def run(self) -> None:
        position = (-1, False)
        while not self._exit_event.wait(self._interval):
            failures = self._failures()
            if failures is None or failures.failed:
                return
            if failures.has_stalled(position):
                try:
                    if failures.answer_roll_call():
                        return
                except OSError:  # the launcher is gone, so nobody can call the roll
                    return
            position = (failures.steps_begun, failures.is_in_step)
            del failures


def _report_exit(reference: weakref.ref[RankFailures]) -> None:
    """Report the exit of the process, through a multiprocessing finalizer; also in children that it started."""
    failures = reference()
    if failures is not None:
        failures.exit_event.set()
        failures.report_exit()

"""Roll call of the ranks after a collective failed: which rank raised, ended, was killed or hangs (S32).

Ranks answer through lists on the store, each entry with the `rank` in the group and its `step`:

- "raised" and "ended": `message`.
- "answers": `error`, that of the rank's own collective; or, from a rank that did not fail, whether it is `inside` a
  step, its `position`, and the `location` of its program for how many `seconds`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from polyamp.rules import liveness
from polyamp.rules.rank_group import MAX_LISTED, RankGroup, dead_ranks_message, format_ranks

ROLL_CALL_TIMEOUT: Final = 6.0
"""Seconds that a roll call waits for answers."""
_POLL_INTERVAL: Final = 0.05

Entry = Mapping[str, Any]


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
        latest = {int(entry["rank"]): entry for entry in (*answers, *failed)}.values()
        inside = [entry["inside"] for entry in latest if "error" not in entry]
        is_explained = len(dead) == len(missing) and (dead or ended or not inside or not all(inside))
        if raised or is_explained or time.monotonic() > end:
            if raised or ended:
                return f"{'; '.join(str(entry['message']) for entry in (*raised, *ended))}."
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


def _hang_message(group: RankGroup, answers: Sequence[Entry]) -> str:
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


def _late_rank_sentence(group: RankGroup, entry: Entry) -> str:
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

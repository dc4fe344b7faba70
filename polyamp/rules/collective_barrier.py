"""Barrier for calls that need every rank, such as `polyamp.save` of a sharded state (S33).

A collective that only some ranks call is matched with whatever the others send next: it stalls, or the process aborts.
So each rank registers on the store and waits there until all ranks have arrived. A rank that took another path reports
this through its step watchdog, so both sides get the error within seconds.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any, Final

from polyamp.rules.failure_report import WATCHDOG_INTERVAL, RankFailures, diverged_ranks_message, find_dead_ranks
from polyamp.rules.rank_group import dead_ranks_message, format_ranks

_GRACE_PERIOD: Final = 1.0
"""Seconds to wait for further reports from diverged ranks after the first one."""
_WARN_AFTER: Final = 5.0
"""Seconds of waiting after which a rank logs a warning."""
_LOG: Final = logging.getLogger("polyamp")


@contextlib.contextmanager
def collective_call(failures: RankFailures, call: str) -> Iterator[None]:
    """Context manager that is entered once every rank of the group has reached it.

    Args:
        failures: this rank's failure reports.
        call: the call as users write it: "polyamp.save". The n-th call of one rank matches the n-th of the others.

    Raises:
        ReplicaError: names a rank that is in a later step, raised, ended, was killed, or did not arrive in time.
    """
    failures.check()
    failures.calls_begun += 1
    failures.is_in_step, failures.current_call = True, call
    try:
        _CollectiveBarrier(failures).wait()
        yield
    finally:
        failures.is_in_step, failures.current_call = False, ""


class _CollectiveBarrier:
    """Barrier of one collective call, under its own keys on the store."""

    def __init__(self, failures: RankFailures) -> None:
        self._failures = failures
        self._group = failures.group
        self._call = failures.current_call
        self._key = f"meeting/{failures.calls_begun}"
        self._processes: dict[int, Any] = {}

    def wait(self) -> None:
        failures, group = self._failures, self._group
        entry = {
            "number": failures.calls_begun,
            "rank": group.rank,
            "call": self._call,
            "step": failures.steps_begun,
        }
        try:
            group.write(f"{self._key}/{group.rank}", entry)
            group.write("meeting", entry)
            if group.store.add(f"{self._key}/count", 1) == group.size:
                group.write(f"{self._key}/all", entry)
                return
            self._wait_for_all()
        except OSError as error:
            raise failures.collective_error(f"{type(error).__name__}: {error}") from error

    def _wait_for_all(self) -> None:
        """Return once all ranks have arrived."""
        failures, group = self._failures, self._group
        begun = last_check = time.monotonic()
        end, warn_at = begun + group.seconds, begun + _WARN_AFTER
        interval = WATCHDOG_INTERVAL * max(1.0, group.size / 16)  # each check reads one key per rank
        while group.read(f"{self._key}/all", max(0.0, min(WATCHDOG_INTERVAL, end - time.monotonic()))) is None:
            now = time.monotonic()
            known = self._describe_diverged_ranks() or self._describe_failed_ranks()
            if not known and now - last_check > interval:
                last_check = now
                known = self._describe_dead_ranks()
            if known:
                raise failures.collective_error(f"not every rank came to {self._call}", known)
            if now > end:
                missing = self._missing_ranks()
                names = group.format_ranks(missing) if missing else "another rank"
                raise failures.collective_error(f"{names} did not come within {group.seconds:g} s")
            if now > warn_at:
                warn_at = end + 1.0
                names = group.format_ranks(self._missing_ranks() or [group.rank])
                _LOG.warning(
                    "polyamp: rank %d waits in %s for %s. Every rank of this state has to call it; it waits for up to "
                    "%g s.",
                    *(group.global_rank, self._call, names, group.seconds),
                )

    def _describe_diverged_ranks(self) -> str:
        """Return a sentence that names the ranks that took another path."""
        group, name = self._group, f"{self._key}/elsewhere"
        if not group.store.add(name, 0):
            return ""
        time.sleep(_GRACE_PERIOD)
        steps: dict[int, list[int]] = {}
        for entry in group.entries(name):
            steps.setdefault(int(entry["step"]), []).append(group.global_ranks[entry["rank"]])
        others = ", ".join(f"{format_ranks(sorted(ranks))} in step {step}" for step, ranks in sorted(steps.items()))
        missing = self._missing_ranks()
        present = [name for rank, name in enumerate(group.global_ranks) if rank not in missing]
        return diverged_ranks_message(present, self._call, self._failures.steps_begun, others)

    def _describe_failed_ranks(self) -> str:
        """Return the reports of ranks that raised or ended."""
        messages = [str(entry["message"]) for name in ("raised", "ended") for entry in self._group.entries(name)]
        if not messages:
            return ""
        return (
            f"{'; '.join(messages)}, and rank {self._group.global_rank} is in {self._call}, which every rank has to "
            "call."
        )

    def _describe_dead_ranks(self) -> str:
        """Return a sentence that names the killed ranks of this machine."""
        group = self._group
        dead = find_dead_ranks(group, self._missing_ranks(), self._processes)
        if not dead or self._describe_failed_ranks():
            return ""
        message = dead_ranks_message([group.global_ranks[rank] for rank in dead])
        return f"{message}; rank {group.global_rank} waits for it in {self._call}."

    def _missing_ranks(self) -> list[int]:
        """Return the ranks that have not registered for this call."""
        return [rank for rank in range(self._group.size) if self._group.read(f"{self._key}/{rank}") is None]

"""Comparison of the ranks' models and settings at `init`, and the messages that name the differing rank (S32).

A backend's `init` collects its rank's fingerprint (versions, engine, recipe, parameters, buffers, and a checksum of the
arrays that must be equal) and calls `compare_ranks` with a shared store. This module knows no framework.

Rank 0 of the group compares, and the other ranks wait for one answer each. So the number of store requests grows with
the number of ranks, not with its square. Ranks send the lines themselves only if a digest differs.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from polyamp.errors import ReplicaError
from polyamp.rules.rank_group import MAX_LISTED, RankGroup, format_error, lost_store_message

Fingerprint = Mapping[str, Sequence[str]]
"""Section title -> its lines, in the same order on all ranks."""

_VERDICT_GRACE: Final = 5.0
"""Seconds that the other ranks wait longer than rank 0, whose answer names the missing ranks."""
_HINTS: Final = {
    "versions": "Install the same versions everywhere.",
    "values": "Build the model from one seed, or load its checkpoint on every rank, before the engine takes it.",
    "shards": "Build the model from one seed, or load its checkpoint on every rank, before the engine takes it.",
}
_HINT: Final = "Build the model and the recipe from the same code, with the same settings, on every rank."


def compare_ranks(group: RankGroup, number: int, fingerprint: Fingerprint, part: str = "") -> None:
    """Compare this rank's fingerprint with those of the others. All ranks call it, and all raise the same error.

    Args:
        group: the ranks.
        number: number of this comparison in the group; the same on every rank.
        fingerprint: that of this rank. The section "shards" is compared only between ranks of the same `part`.
        part: identifies the part of sharded arrays on this rank.

    Raises:
        ReplicaError: names the ranks that differ or did not arrive.
    """
    comparison = _RankComparison(group, number)
    try:
        comparison.report({"digests": {title: _digest(lines) for title, lines in fingerprint.items()}, "part": part})
        message = comparison.lead(fingerprint) if group.rank == 0 else comparison.follow(fingerprint)
    except OSError as error:
        raise ReplicaError(lost_store_message(group)) from error
    if message:
        raise ReplicaError(message)


def report_init_error(group: RankGroup, number: int, error: BaseException) -> None:
    """Report, instead of calling `compare_ranks`, that this rank's `init` raised earlier."""
    comparison = _RankComparison(group, number)
    comparison.report({"raised": format_error(error)})
    if group.rank == 0:
        comparison.publish_verdict(comparison.absence_message({0: {"raised": format_error(error)}}, []))


class _RankComparison:
    """One comparison, under its own keys on the store."""

    def __init__(self, group: RankGroup, number: int) -> None:
        self.group = group
        self.prefix = f"init/{number}"

    def report(self, entry: Mapping[str, Any]) -> None:
        """Store this rank's digests, or why there are none."""
        self.group.write(f"{self.prefix}/{self.group.rank}", entry)

    def publish_verdict(self, message: str) -> None:
        """Publish the verdict of rank 0."""
        self.group.write(f"{self.prefix}/verdict", {"words": message})

    def lead(self, fingerprint: Fingerprint) -> str:
        """Compare all ranks, as rank 0, and return the message for the differences; "" for none."""
        entries, missing = self._collect_entries(self.group.seconds)
        message = self.absence_message(entries, missing)
        if not message:
            alike = group_ranks_by_fingerprint([(entry["digests"], entry["part"]) for entry in entries.values()])
            message = "" if len(alike) == 1 else self._request_difference(alike, entries, fingerprint)
        self.publish_verdict(message)
        return message

    def follow(self, fingerprint: Fingerprint) -> str:
        """Return rank 0's message. Sends the lines of the fingerprint if they are asked for."""
        verdict = self.group.read(f"{self.prefix}/verdict", self.group.seconds + _VERDICT_GRACE)
        if verdict is not None and verdict.get("tell"):
            text = zlib.compress(json.dumps({title: list(lines) for title, lines in fingerprint.items()}).encode())
            self.group.store.set(f"{self.prefix}/told/{self.group.rank}", text)
            verdict = self.group.read(f"{self.prefix}/words", self.group.seconds + _VERDICT_GRACE)
        if verdict is None:
            entries, missing = self._collect_entries(0.0)
            return self.absence_message(entries, missing or [0])
        return str(verdict["words"])

    def absence_message(self, entries: Mapping[int, Mapping[str, Any]], missing: Sequence[int]) -> str:
        """Return the message for ranks that raised, or else for those that are missing; "" for none."""
        raised = sorted((rank, entry["raised"]) for rank, entry in entries.items() if "raised" in entry)
        if raised:
            errors = (f"raised {error} on {self.group.format_ranks([rank])}" for rank, error in raised[:MAX_LISTED])
            return f"polyamp.init {'; '.join(errors)}"
        if missing:
            return (
                f"{self.group.format_ranks(missing)} did not come to polyamp.init within {self.group.seconds:g} s. "
                "Every rank calls it, for the same models in the same order; look at what that rank printed."
            )
        return ""

    def _collect_entries(self, seconds: float) -> tuple[dict[int, Any], list[int]]:
        """Return the stored entries by rank, and the missing ranks. Stops waiting as soon as one rank raised."""
        end = time.monotonic() + seconds
        entries: dict[int, Any] = {}
        missing = list(range(self.group.size))
        while missing:
            for rank in list(missing):
                entry = self.group.read(f"{self.prefix}/{rank}", min(0.2, max(0.0, end - time.monotonic())))
                if entry is not None:
                    entries[rank] = entry
                    missing.remove(rank)
            if time.monotonic() >= end or any("raised" in entry for entry in entries.values()):
                break
        return entries, missing

    def _request_difference(self, alike: list[list[int]], entries: Mapping[int, Any], fingerprint: Fingerprint) -> str:
        """Request the lines of the first of the ranks that are alike, and compare them with those of the majority."""
        self.group.write(f"{self.prefix}/verdict", {"tell": True})
        parts = {rank: str(entry["part"]) for rank, entry in entries.items()}
        fingerprints: dict[int, Fingerprint] = {0: fingerprint}
        for ranks in alike[: MAX_LISTED + 1]:
            for rank in {ranks[0], _comparison_peer(ranks[0], alike[0], parts)} - {0}:
                text = self.group.store.get(f"{self.prefix}/told/{rank}", _VERDICT_GRACE)
                fingerprints[rank] = {} if text is None else json.loads(zlib.decompress(text))
        message = difference_message(self.group, alike, fingerprints, parts)
        self.group.write(f"{self.prefix}/words", {"words": message})  # late readers of the verdict need it too
        return message


def group_ranks_by_fingerprint(reports: Sequence[tuple[Mapping[str, str], str]]) -> list[list[int]]:
    """Group ranks by fingerprint: the largest group first, then in the order of their first rank.

    Args:
        reports: by rank, (digest by section, part of sharded arrays). "shards" of different parts are not compared.
            A rank whose shards differ from most of its part forms its own group.

    Example:
        >>> group_ranks_by_fingerprint([({"recipe": "a"}, ""), ({"recipe": "b"}, ""), ({"recipe": "a"}, "")])
        [[0, 2], [1]]
    """
    usual: dict[str, str] = {}
    for part in dict.fromkeys(own for _, own in reports):
        shards = [digests.get("shards", "") for digests, own in reports if own == part]
        usual[part] = max(dict.fromkeys(shards), key=shards.count)
    alike: dict[tuple[Any, ...], list[int]] = {}
    for rank, (digests, part) in enumerate(reports):
        own = digests.get("shards", "")
        rest = tuple(sorted((title, digest) for title, digest in digests.items() if title != "shards"))
        alike.setdefault((rest, None if own == usual[part] else (part, own)), []).append(rank)
    return sorted(alike.values(), key=lambda ranks: (-len(ranks), ranks[0]))


def difference_message(
    group: RankGroup,
    alike: Sequence[Sequence[int]],
    fingerprints: Mapping[int, Fingerprint],
    parts: Mapping[int, str],
) -> str:
    """Return one sentence for the ranks of each kind that differs from the majority, about the first difference."""
    sentences, hints = [], dict[str, None]()
    majority = alike[0]
    for ranks in alike[1 : MAX_LISTED + 1]:
        peer = _comparison_peer(ranks[0], majority, parts)
        title, one, other = first_difference(fingerprints.get(ranks[0], {}), fingerprints.get(peer, {}))
        verb = "brings" if len(ranks) == 1 else "bring"
        lines = f"{_format_line(one)} there, {_format_line(other)} here"
        sentences.append(
            f"{group.format_ranks(ranks)} {verb} other {title} than {group.format_ranks(majority)}: {lines}."
        )
        hints[_HINTS.get(title, _HINT)] = None
    return " ".join([*sentences, *hints])


def first_difference(one: Fingerprint, other: Fingerprint) -> tuple[str, str | None, str | None]:
    """Return the title of the first differing section, and its first differing line on each rank; None for no line."""
    for title in dict.fromkeys((*one, *other)):
        for first, second in itertools.zip_longest(one.get(title, ()), other.get(title, ())):
            if first != second:
                return title, first, second
    return "values", None, None


def _comparison_peer(rank: int, among: Sequence[int], parts: Mapping[int, str]) -> int:
    """Return the rank to compare one rank with: the first with the same part of sharded arrays, if there is one."""
    return next((other for other in among if parts.get(other) == parts.get(rank)), among[0])


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:24]


def _format_line(line: str | None) -> str:
    return "nothing" if line is None else repr(line)

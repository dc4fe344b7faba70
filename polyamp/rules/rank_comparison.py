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
import re
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from polyamp.errors import ReplicaError

Fingerprint = Mapping[str, Sequence[str]]
"""Section title -> its lines, in the same order on all ranks."""

_VERDICT_GRACE: Final = 5.0
"""Seconds that the other ranks wait longer than rank 0, whose answer names the missing ranks."""
_MAX_LISTED: Final = 8
"""Maximum number of ranks that a message lists, and of rank groups whose lines it compares."""
_HINTS: Final = {
    "versions": "Install the same versions everywhere.",
    "values": "Build the model from one seed, or load its checkpoint on every rank, before the engine takes it.",
    "shards": "Build the model from one seed, or load its checkpoint on every rank, before the engine takes it.",
}
_HINT: Final = "Build the model and the recipe from the same code, with the same settings, on every rank."


_SOURCE_LOCATION: Final = re.compile(r"\[\S+\.(cc|cpp|h|cu):\d+\] ")
"""Location in a framework's own source at which an error was raised."""


class RankStore(Protocol):
    """Key-value store shared by the ranks, such as torch's `TCPStore` or JAX's coordination service.

    Every method may raise `OSError`, such as `ConnectionError`, if the server is gone or does not answer. No method
    waits for the server longer than a few seconds.
    """

    def reach(self) -> None:
        """Check that the server answers, before other methods are used. Raises `ConnectionError` or another `OSError`
        if it does not."""

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""

    def get(self, key: str, seconds: float) -> bytes | None:
        """Wait up to `seconds` for a value and return it; None if it is missing."""

    def add(self, key: str, number: int) -> int:
        """Add to a counter, which starts at 0, and return it."""


class RankGroup(NamedTuple):
    """Ranks that train one model.

    Attributes:
        store: the shared store; its keys belong to this group.
        place: this rank's number within the group, from 0.
        names: number of each rank among all processes, by place, for messages.
        seconds: timeout of the group's collectives.
    """

    store: RankStore
    place: int
    names: Sequence[int]
    seconds: float

    def format_ranks(self, places: Sequence[int]) -> str:
        """Return the places as text, such as "rank 3" or "ranks 0, 2 and 5"."""
        return format_ranks([self.names[place] for place in places])


def compare_ranks(group: RankGroup, number: int, brought: Fingerprint, part: str = "") -> None:
    """Compare this rank's fingerprint with those of the others. All ranks call it, and all raise the same error.

    Args:
        group: the ranks.
        number: number of this comparison in the group; the same on every rank.
        brought: this rank's fingerprint. The section "shards" is compared only between ranks of the same `part`.
        part: identifies the part of sharded arrays on this rank.

    Raises:
        ReplicaError: names the ranks that differ or did not arrive.

    Example:
        >>> import threading
        >>> from polyamp.rules.failure_report import InMemoryStore
        >>> shelf, said = InMemoryStore(), []
        >>> def rank(place: int, shape: str) -> None:
        ...     try:
        ...         compare_ranks(RankGroup(shelf, place, (0, 1), 5.0), 0, {"parameters": ["w: float32 " + shape]})
        ...     except ReplicaError as error:
        ...         said.append(str(error))
        >>> threads = [threading.Thread(target=rank, args=each) for each in enumerate(("[3]", "[4]"))]
        >>> [thread.start() for thread in threads], [thread.join() for thread in threads]
        ([None, None], [None, None])
        >>> said[0] == said[1], said[0].partition(". ")[0]
        (True, "rank 1 brings other parameters than rank 0: 'w: float32 [4]' there, 'w: float32 [3]' here")
    """
    _RankComparison(group, f"init/{number}").run(brought, part)


def report_init_error(group: RankGroup, number: int, error: BaseException) -> None:
    """Report, instead of calling `compare_ranks`, that this rank's `init` raised earlier."""
    comparison = _RankComparison(group, f"init/{number}")
    comparison.put({"raised": format_error(error)})
    if group.place == 0:
        comparison.publish_verdict(comparison.absence_message({0: format_error(error)}, []))


class _RankComparison:
    """One comparison, under its own keys on the store."""

    def __init__(self, group: RankGroup, prefix: str) -> None:
        self.group = group
        self.prefix = prefix

    def put(self, what: Mapping[str, Any]) -> None:
        """Store this rank's fingerprint, or why there is none."""
        self._set(f"{self.prefix}/{self.group.place}", what)

    def publish_verdict(self, words: str) -> None:
        """Publish the verdict of rank 0."""
        self._set(f"{self.prefix}/verdict", {"words": words})

    def run(self, brought: Fingerprint, part: str) -> None:
        try:
            self.put({"digests": {title: _digest(lines) for title, lines in brought.items()}, "part": part})
            words = self._run_leader(brought) if self.group.place == 0 else self._run_follower(brought)
        except OSError as error:
            raise ReplicaError(lost_store_message(self.group)) from error
        if words:
            raise ReplicaError(words)

    def _run_leader(self, brought: Fingerprint) -> str:
        came, missing = self._collect_entries(self.group.seconds)
        raised = {place: found["raised"] for place, found in came.items() if "raised" in found}
        if raised or missing:
            words = self.absence_message(raised, missing)
        else:
            kinds = group_ranks_by_fingerprint([(found["digests"], found["part"]) for found in came.values()])
            words = "" if len(kinds) == 1 else self._request_difference(kinds, came, brought)
        self.publish_verdict(words)
        return words

    def _run_follower(self, brought: Fingerprint) -> str:
        verdict = self._get(f"{self.prefix}/verdict", self.group.seconds + _VERDICT_GRACE)
        if verdict is not None and verdict.get("tell"):
            text = zlib.compress(json.dumps({title: list(lines) for title, lines in brought.items()}).encode())
            self.group.store.set(f"{self.prefix}/told/{self.group.place}", text)
            verdict = self._get(f"{self.prefix}/words", self.group.seconds + _VERDICT_GRACE)
        if verdict is None:
            came, missing = self._collect_entries(0.0)
            return self.absence_message(
                {p: found["raised"] for p, found in came.items() if "raised" in found}, missing or [0]
            )
        return str(verdict["words"])

    def _collect_entries(self, seconds: float) -> tuple[dict[int, Any], list[int]]:
        """Return the stored entries by place, and the missing ranks. Stops waiting as soon as one rank raised."""
        end = time.monotonic() + seconds
        came: dict[int, Any] = {}
        open_ = list(range(len(self.group.names)))
        while open_:
            for place in list(open_):
                found = self._get(f"{self.prefix}/{place}", min(0.2, max(0.0, end - time.monotonic())))
                if found is not None:
                    came[place] = found
                    open_.remove(place)
            if time.monotonic() >= end or any("raised" in found for found in came.values()):
                break
        return came, open_

    def absence_message(self, raised: Mapping[int, str], missing: list[int]) -> str:
        """Return the message for ranks that raised, or else for those that are missing."""
        if raised:
            return "polyamp.init " + "; ".join(
                f"raised {text} on rank {self.group.names[place]}"
                for place, text in sorted(raised.items())[:_MAX_LISTED]
            )
        return (
            f"{self.group.format_ranks(missing)} did not come to polyamp.init within {self.group.seconds:g} s. Every "
            "rank calls it, for the same models in the same order; look at what that rank printed."
        )

    def _request_difference(self, kinds: list[list[int]], came: Mapping[int, Any], brought: Fingerprint) -> str:
        """Request the lines of the first rank of each kind, and compare them with those of the majority."""
        self._set(f"{self.prefix}/verdict", {"tell": True})
        parts = {place: str(found["part"]) for place, found in came.items()}
        told: dict[int, Fingerprint] = {0: brought}
        for kind in kinds[: _MAX_LISTED + 1]:
            for place in {kind[0], _comparison_peer(kind[0], kinds[0], parts)} - {0}:
                text = self.group.store.get(f"{self.prefix}/told/{place}", _VERDICT_GRACE)
                told[place] = {} if text is None else json.loads(zlib.decompress(text))
        words = difference_message(self.group, kinds, told, parts)
        self._set(f"{self.prefix}/words", {"words": words})  # late readers of the verdict need the message too
        return words

    def _set(self, key: str, what: Mapping[str, Any]) -> None:
        self.group.store.set(key, json.dumps(what).encode())

    def _get(self, key: str, seconds: float) -> Any:
        value = self.group.store.get(key, seconds)
        return None if value is None else json.loads(value)


def group_ranks_by_fingerprint(brought: Sequence[tuple[Mapping[str, str], str]]) -> list[list[int]]:
    """Group places by fingerprint: the largest group first, then in the order of their first rank.

    Args:
        brought: by place, (digest by section, part of sharded arrays). "shards" of different parts are not compared.
            A rank whose shards differ from most of its part forms its own group.

    Example:
        >>> group_ranks_by_fingerprint([({"recipe": "a"}, ""), ({"recipe": "b"}, ""), ({"recipe": "a"}, "")])
        [[0, 2], [1]]
    """
    usual: dict[str, str] = {}
    for part in dict.fromkeys(own for _, own in brought):
        found = [digests.get("shards", "") for digests, own in brought if own == part]
        usual[part] = max(dict.fromkeys(found), key=found.count)
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for place, (digests, part) in enumerate(brought):
        shards = digests.get("shards", "")
        rest = tuple(sorted((title, digest) for title, digest in digests.items() if title != "shards"))
        kinds.setdefault((rest, None if shards == usual[part] else (part, shards)), []).append(place)
    return sorted(kinds.values(), key=lambda kind: (-len(kind), kind[0]))


def difference_message(
    group: RankGroup, kinds: Sequence[Sequence[int]], told: Mapping[int, Fingerprint], parts: Mapping[int, str]
) -> str:
    """Return one sentence per kind of rank that differs from the majority, about its first difference."""
    sentences, hints = [], dict[str, None]()
    most = kinds[0]
    for kind in kinds[1 : _MAX_LISTED + 1]:
        here = _comparison_peer(kind[0], most, parts)
        title, one, other = first_difference(told.get(kind[0], {}), told.get(here, {}))
        verb = "brings" if len(kind) == 1 else "bring"
        shown = f"{_format_line(one)} there, {_format_line(other)} here"
        sentences.append(f"{group.format_ranks(kind)} {verb} other {title} than {group.format_ranks(most)}: {shown}.")
        hints[_HINTS.get(title, _HINT)] = None
    return " ".join([*sentences, *hints])


def first_difference(one: Fingerprint, other: Fingerprint) -> tuple[str, str | None, str | None]:
    """Return the title of the first differing section, and its first differing line on each rank; None for no line."""
    for title in dict.fromkeys((*one, *other)):
        for first, second in itertools.zip_longest(one.get(title, ()), other.get(title, ())):
            if first != second:
                return title, first, second
    return "values", None, None


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text.

    >>> format_ranks([3]), format_ranks([0, 2, 5])
    ('rank 3', 'ranks 0, 2 and 5')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _MAX_LISTED:
        return f"ranks {', '.join(map(str, ranks[:_MAX_LISTED]))} and {len(ranks) - _MAX_LISTED} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def format_error(error: BaseException, most: int = 600) -> str:
    """Return an error as one line: its class and message, truncated to `most` characters.

    >>> format_error(ValueError("no\\nrows"))
    'ValueError: no rows'
    """
    words = " ".join(_SOURCE_LOCATION.sub("", str(error)).split())
    text = f"{type(error).__name__}: {words}" if words else type(error).__name__
    return text if len(text) <= most else f"{text[: most - 3]}..."


def lost_store_message(group: RankGroup) -> str:
    """Return the message for a store that is gone."""
    return (
        "the store that the ranks of this process group share does not answer. It is kept by the launcher "
        f"(torchrun) or, without one, by rank 0's process: if that ended or was stopped, rank {group.names[0]} is the "
        "one to look at."
    )


def _comparison_peer(place: int, among: Sequence[int], parts: Mapping[int, str]) -> int:
    """Return the rank to compare one rank with: the first with the same part of sharded arrays, if there is one."""
    return next((other for other in among if parts.get(other) == parts.get(place)), among[0])


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:24]


def _format_line(line: str | None) -> str:
    return "nothing" if line is None else repr(line)

"""What several ranks bring to `init`, compared; and the words that name the rank that differs (S32).

A backend's `init` gathers what its rank brings (versions, engine, recipe, parameters, buffers, and a checksum of what
all must have alike) and calls `compare` with a store that every rank reaches. Nothing here knows a framework.

Rank 0 of the group compares, for the others wait for one answer each: a store sees a number of requests that grows with
the ranks, and not with their square. The lines themselves are only sent where something differs.
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

Brought = Mapping[str, Sequence[str]]
"""Title of a section -> its lines, in an order that is the same on all ranks."""

_SLACK: Final = 5.0
"""Seconds that the others wait longer than rank 0 does, whose answer names who did not come."""
_MOST: Final = 8
"""Ranks that a message lists, and groups of ranks whose lines it compares."""
_HINTS: Final = {
    "versions": "Install the same versions everywhere.",
    "values": "Build the model from one seed, or load its checkpoint on every rank, before the engine takes it.",
    "shards": "Build the model from one seed, or load its checkpoint on every rank, before the engine takes it.",
}
_HINT: Final = "Build the model and the recipe from the same code, with the same settings, on every rank."


_SOURCE: Final = re.compile(r"\[\S+\.(cc|cpp|h|cu):\d+\] ")
"""Where in a framework's own source an error was raised."""


class Store(Protocol):
    """What the ranks share: small values by name, as torch's `TCPStore` or JAX's coordination service keep them.

    Every method may raise `OSError`, such as `ConnectionError`: what keeps the values is gone, or does not answer. None
    waits for that longer than a few seconds.
    """

    def reach(self) -> None:
        """Raise `ConnectionError`, or another `OSError`, if what keeps the values does not answer; asked before the
        other methods where it may be gone."""

    def set(self, key: str, value: bytes) -> None:
        """Put a value."""

    def get(self, key: str, seconds: float) -> bytes | None:
        """The value, for which it waits so long at most; None if it is not there then."""

    def add(self, key: str, number: int) -> int:
        """Add to a counter, which begins at 0, and return it."""


class Group(NamedTuple):
    """The ranks that train one model.

    Attributes:
        store: what they share; its names are the group's own.
        place: this rank's number within the group, from 0.
        names: what each is called in messages, by place: its number among all processes.
        seconds: how long a collective of the group waits for the others.
    """

    store: Store
    place: int
    names: Sequence[int]
    seconds: float

    def called(self, places: Sequence[int]) -> str:
        """Such as "rank 3" or "ranks 0, 2 and 5"."""
        return called([self.names[place] for place in places])


def compare(group: Group, number: int, brought: Brought, part: str = "") -> None:
    """Compare what this rank brings with what the others do; all of them call it, and all raise the same.

    Args:
        group: the ranks.
        number: which comparison of this group it is; the same on every rank.
        brought: what this rank has. A section "shards" is only compared with that of ranks of the same `part`.
        part: which part of sharded arrays lies here.

    Raises:
        ReplicaError: names the ranks that bring something else, or that did not come.

    Example:
        >>> import threading
        >>> from polyamp.rules.roll_call import Shelf
        >>> shelf, said = Shelf(), []
        >>> def rank(place: int, shape: str) -> None:
        ...     try:
        ...         compare(Group(shelf, place, (0, 1), 5.0), 0, {"parameters": ["w: float32 " + shape]})
        ...     except ReplicaError as error:
        ...         said.append(str(error))
        >>> threads = [threading.Thread(target=rank, args=each) for each in enumerate(("[3]", "[4]"))]
        >>> [thread.start() for thread in threads], [thread.join() for thread in threads]
        ([None, None], [None, None])
        >>> said[0] == said[1], said[0].partition(". ")[0]
        (True, "rank 1 brings other parameters than rank 0: 'w: float32 [4]' there, 'w: float32 [3]' here")
    """
    _Comparison(group, f"init/{number}").run(brought, part)


def withdrawn(group: Group, number: int, error: BaseException) -> None:
    """Say in the place of `compare` that this rank's `init` raised before it came to that."""
    comparison = _Comparison(group, f"init/{number}")
    comparison.put({"raised": shortened(error)})
    if group.place == 0:
        comparison.give(comparison.absent({0: shortened(error)}, []))


class _Comparison:
    """One comparison, by names of its own."""

    def __init__(self, group: Group, prefix: str) -> None:
        self.group = group
        self.prefix = prefix

    def put(self, what: Mapping[str, Any]) -> None:
        """What this rank brings, or why it does not come."""
        self._set(f"{self.prefix}/{self.group.place}", what)

    def give(self, words: str) -> None:
        """Rank 0's answer."""
        self._set(f"{self.prefix}/verdict", {"words": words})

    def run(self, brought: Brought, part: str) -> None:
        try:
            self.put({"digests": {title: _digest(lines) for title, lines in brought.items()}, "part": part})
            words = self._led(brought) if self.group.place == 0 else self._followed(brought)
        except OSError as error:
            raise ReplicaError(lost_store(self.group)) from error
        if words:
            raise ReplicaError(words)

    def _led(self, brought: Brought) -> str:
        came, missing = self._came(self.group.seconds)
        raised = {place: found["raised"] for place, found in came.items() if "raised" in found}
        if raised or missing:
            words = self.absent(raised, missing)
        else:
            kinds = alike([(found["digests"], found["part"]) for found in came.values()])
            words = "" if len(kinds) == 1 else self._explained(kinds, came, brought)
        self.give(words)
        return words

    def _followed(self, brought: Brought) -> str:
        verdict = self._get(f"{self.prefix}/verdict", self.group.seconds + _SLACK)
        if verdict is not None and verdict.get("tell"):
            text = zlib.compress(json.dumps({title: list(lines) for title, lines in brought.items()}).encode())
            self.group.store.set(f"{self.prefix}/told/{self.group.place}", text)
            verdict = self._get(f"{self.prefix}/words", self.group.seconds + _SLACK)
        if verdict is None:
            came, missing = self._came(0.0)
            return self.absent({p: found["raised"] for p, found in came.items() if "raised" in found}, missing or [0])
        return str(verdict["words"])

    def _came(self, seconds: float) -> tuple[dict[int, Any], list[int]]:
        """What each rank put, by place, and who did not come; as soon as one raised, who did not come is not asked."""
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

    def absent(self, raised: Mapping[int, str], missing: list[int]) -> str:
        """The words about ranks that raised, or else about those that did not come."""
        if raised:
            return "polyamp.init " + "; ".join(
                f"raised {text} on rank {self.group.names[place]}" for place, text in sorted(raised.items())[:_MOST]
            )
        return (
            f"{self.group.called(missing)} did not come to polyamp.init within {self.group.seconds:g} s. Every rank "
            "calls it, for the same models in the same order; look at what that rank printed."
        )

    def _explained(self, kinds: list[list[int]], came: Mapping[int, Any], brought: Brought) -> str:
        """Ask the first rank of each kind for its lines, and compare them with those of most ranks."""
        self._set(f"{self.prefix}/verdict", {"tell": True})
        parts = {place: str(found["part"]) for place, found in came.items()}
        told: dict[int, Brought] = {0: brought}
        for kind in kinds[: _MOST + 1]:
            for place in {kind[0], _beside(kind[0], kinds[0], parts)} - {0}:
                text = self.group.store.get(f"{self.prefix}/told/{place}", _SLACK)
                told[place] = {} if text is None else json.loads(zlib.decompress(text))
        words = differences(self.group, kinds, told, parts)
        self._set(f"{self.prefix}/words", {"words": words})  # who reads the verdict late finds these words there too
        return words

    def _set(self, key: str, what: Mapping[str, Any]) -> None:
        self.group.store.set(key, json.dumps(what).encode())

    def _get(self, key: str, seconds: float) -> Any:
        value = self.group.store.get(key, seconds)
        return None if value is None else json.loads(value)


def alike(brought: Sequence[tuple[Mapping[str, str], str]]) -> list[list[int]]:
    """Places by what they bring: those that most have first, then in the order of their first rank.

    Args:
        brought: by place, digest by section, and which part of sharded arrays is there. "shards" of different parts
            are not compared; a rank whose shards are not what most of its part have is of a kind of its own.

    Example:
        >>> alike([({"recipe": "a"}, ""), ({"recipe": "b"}, ""), ({"recipe": "a"}, "")])
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


def differences(
    group: Group, kinds: Sequence[Sequence[int]], told: Mapping[int, Brought], parts: Mapping[int, str]
) -> str:
    """The sentence for each kind of rank that is not as most are: in what it differs first."""
    sentences, hints = [], dict[str, None]()
    most = kinds[0]
    for kind in kinds[1 : _MOST + 1]:
        here = _beside(kind[0], most, parts)
        title, one, other = first_difference(told.get(kind[0], {}), told.get(here, {}))
        verb = "brings" if len(kind) == 1 else "bring"
        shown = f"{_shown(one)} there, {_shown(other)} here"
        sentences.append(f"{group.called(kind)} {verb} other {title} than {group.called(most)}: {shown}.")
        hints[_HINTS.get(title, _HINT)] = None
    return " ".join([*sentences, *hints])


def first_difference(one: Brought, other: Brought) -> tuple[str, str | None, str | None]:
    """The title of the first section in which two ranks differ, and the first line of each there; None for no line."""
    for title in dict.fromkeys((*one, *other)):
        for first, second in itertools.zip_longest(one.get(title, ()), other.get(title, ())):
            if first != second:
                return title, first, second
    return "values", None, None


def called(ranks: Sequence[int]) -> str:
    """Ranks as a sentence has them.

    >>> called([3]), called([0, 2, 5])
    ('rank 3', 'ranks 0, 2 and 5')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _MOST:
        return f"ranks {', '.join(map(str, ranks[:_MOST]))} and {len(ranks) - _MOST} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def shortened(error: BaseException, most: int = 600) -> str:
    """An error as a line: its class and its words, cut off where they are long.

    >>> shortened(ValueError("no\\nrows"))
    'ValueError: no rows'
    """
    words = " ".join(_SOURCE.sub("", str(error)).split())
    text = f"{type(error).__name__}: {words}" if words else type(error).__name__
    return text if len(text) <= most else f"{text[: most - 3]}..."


def lost_store(group: Group) -> str:
    """What is said when the store itself is gone."""
    return (
        "the store that the ranks of this process group share does not answer. It is kept by the launcher "
        f"(torchrun) or, without one, by rank 0's process: if that ended or was stopped, rank {group.names[0]} is the "
        "one to look at."
    )


def _beside(place: int, among: Sequence[int], parts: Mapping[int, str]) -> int:
    """With which of some ranks one is compared: the first that has the same part of sharded arrays, if there is one."""
    return next((other for other in among if parts.get(other) == parts.get(place)), among[0])


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:24]


def _shown(line: str | None) -> str:
    return "nothing" if line is None else repr(line)

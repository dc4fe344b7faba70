"""Ranks that train one model, the store that they share, and how messages name them (S32)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from polyamp.errors import join_first

MAX_LISTED: Final = 8
"""Maximum number of ranks that a message lists."""
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
    """Ranks that train one model. Values on their store are JSON.

    Attributes:
        store: the shared store; its keys belong to this group.
        rank: this rank's number within the group, from 0.
        global_ranks: number of each rank among all processes, for messages.
        seconds: timeout of the group's collectives.
    """

    store: RankStore
    rank: int
    global_ranks: Sequence[int]
    seconds: float

    @property
    def global_rank(self) -> int:
        """This rank's number among all processes."""
        return self.global_ranks[self.rank]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.global_ranks)

    def write(self, key: str, value: Mapping[str, Any]) -> None:
        """Store a value."""
        self.store.set(key, json.dumps(value).encode())

    def read(self, key: str, seconds: float = 0.0) -> Any:
        """Wait up to `seconds` for a value and return it; None if it is missing."""
        value = self.store.get(key, seconds)
        return None if value is None else json.loads(value)

    def append(self, name: str, value: Mapping[str, Any]) -> None:
        """Append an entry to a list."""
        self.write(f"{name}/{self.store.add(name, 1)}", value)

    def entries(self, name: str) -> Iterator[Any]:
        """Iterate over the entries of a list."""
        for number in range(1, self.store.add(name, 0) + 1):
            value = self.read(f"{name}/{number}", 1.0)
            if value is not None:
                yield value

    def format_ranks(self, ranks: Sequence[int]) -> str:
        """Return ranks of this group as text, such as "rank 3" or "ranks 0, 2 and 5"."""
        return format_ranks([self.global_ranks[rank] for rank in ranks])


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text.

    >>> format_ranks([3]), format_ranks([0, 2, 5])
    ('rank 3', 'ranks 0, 2 and 5')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > MAX_LISTED:
        return f"ranks {join_first(list(map(str, ranks)), MAX_LISTED)}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def format_error(error: BaseException, most: int = 600) -> str:
    """Return an error as one line: its class and message, truncated to `most` characters.

    >>> format_error(ValueError("no\\nrows"))
    'ValueError: no rows'
    """
    message = " ".join(_SOURCE_LOCATION.sub("", str(error)).split())
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return text if len(text) <= most else f"{text[: most - 3]}..."


def dead_ranks_message(ranks: Sequence[int]) -> str:
    """Return the message for ranks whose processes are gone.

    >>> dead_ranks_message([3])
    'rank 3 is no longer running: killed, or ended without a word'
    """
    verb = "is" if len(ranks) == 1 else "are"
    return f"{format_ranks(ranks)} {verb} no longer running: killed, or ended without a word"


def lost_store_message(group: RankGroup) -> str:
    """Return the message for a store that is gone."""
    return (
        "the store that the ranks of this process group share does not answer. It is kept by the launcher "
        f"(torchrun) or, without one, by rank 0's process: if that ended or was stopped, rank {group.global_ranks[0]} "
        "is the one to look at."
    )

"""Store for ranks that are threads of one process."""

from __future__ import annotations

import threading


class InMemoryStore:
    """`polyamp.rules.rank_group.RankStore` within one process whose threads are the ranks.

    Example:
        >>> store = InMemoryStore()
        >>> store.set("a", b"1")
        >>> store.get("a", 0.0), store.get("b", 0.0), store.add("c", 2)
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

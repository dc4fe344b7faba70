"""Single-file save of a state that every rank holds whole; any rank may save, alone or with the others (S33).

No rank knows whether the others call `save` too. So rank 0 never waits: it reports on the store when it begins and ends
writing. Another rank waits for these reports, and writes the same file itself if they do not arrive.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

from polyamp.errors import CheckpointError, ReplicaError
from polyamp.rules import liveness
from polyamp.rules.rank_comparison import RankGroup, format_error, lost_store_message

WRITER_TIMEOUT: Final = 5.0
"""Seconds that a rank waits for rank 0 to begin before it writes itself."""
_LIVENESS_INTERVAL: Final = 0.5
"""Seconds between two checks whether the writing rank still runs."""
_WAITING_KEY: Final = "save/waiting"
_SERVED_KEY: Final = "save/served"
_PREVIOUS_INTACT: Final = "The checkpoint before is whole."


class SingleWriter:
    """Saves of one rank, numbered consistently over the ranks that call all of them.

    Example:
        >>> from polyamp.rules.failure_report import InMemoryStore
        >>> written = []
        >>> SingleWriter(RankGroup(InMemoryStore(), 0, (0, 1), 5.0)).write(
        ...     "run/state", "step 3", lambda: written.append(1), list
        ... )
        >>> written
        [1]
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._number: Counter[str] = Counter()
        self._point = ""
        self._wrote = False

    def write(self, path: str, point: str, put: Callable[[], None], look: Callable[[], Any]) -> None:
        """Have one rank write the file. On return it is complete for every rank that calls this.

        Args:
            path: the path as the user gave it.
            point: identifies the state and the position of the save in the program; the same on every rank.
            put: writes the file atomically.
            look: returns a value that changes with the file's content, as this rank sees it; None for no file.

        Raises:
            CheckpointError: the writing rank raised and is named; or this rank does not see the file.
            ReplicaError: the writing rank was killed or hangs. The previous checkpoint is intact.
        """
        if point != self._point:
            self._point = point
            self._number.clear()
        self._number[path] += 1
        name = json.dumps([path, point, self._number[path]])
        key = f"save/{hashlib.sha256(name.encode()).hexdigest()[:24]}"
        if self._group.place == 0:
            self._put(key, put)
        else:
            self._follow(key, path, put, look)

    def is_needed(self) -> bool:
        """Whether another rank waits for reports of this one, whose process hosts the store."""
        store = self._group.store
        return self._wrote and store.add(_WAITING_KEY, 0) > store.add(_SERVED_KEY, 0)

    def _put(self, key: str, put: Callable[[], None]) -> None:
        """Write the file and report it. A report that fails because the store is gone does not stop the save."""
        self._wrote = True
        here: dict[str, Any] = {"place": self._group.place}
        self._publish(f"{key}/begun", here | liveness.process_identity())
        try:
            put()
        except BaseException as error:
            self._publish(f"{key}/end", {**here, "error": format_error(error)})
            raise
        self._publish(f"{key}/end", here)

    def _publish(self, key: str, what: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._group.store.set(key, json.dumps(what).encode())

    def _follow(self, key: str, path: str, put: Callable[[], None], look: Callable[[], Any]) -> None:
        store, before = self._group.store, look()
        writer: Mapping[str, Any] | None = None
        try:
            store.reach()
            store.add(_WAITING_KEY, 1)
            try:
                writer = self._find_writer(key)
                end = None if writer is None else self._wait_for_end(key, writer)
            finally:
                store.add(_SERVED_KEY, 1)
        except OSError as error:
            if writer is not None and look() == before:  # else the file was written, and the host of the store ended
                raise ReplicaError(f"{lost_store_message(self._group)} {_PREVIOUS_INTACT}") from error
            end = {} if writer is not None else None
        if end is None:
            self._put(key, put)
        elif "error" in end:
            raise CheckpointError(f"{self._format_writer(end)} could not write {path}: {end['error']}")
        elif look() is None:
            raise CheckpointError(
                f"{path} is not there, though {self._format_writer(writer or {})} wrote it. All ranks must see one "
                "path: on storage that they share; or let one rank alone call polyamp.save."
            )

    def _find_writer(self, key: str) -> Mapping[str, Any] | None:
        """Return the writing rank's report; None if this rank has to write."""
        store = self._group.store
        said = store.get(f"{key}/begun", WRITER_TIMEOUT)
        if said is None and store.add(f"{key}/claims", 1) > 1:
            said = store.get(f"{key}/begun", WRITER_TIMEOUT)
        found: Mapping[str, Any] | None = None if said is None else json.loads(said)
        return found

    def _wait_for_end(self, key: str, writer: Mapping[str, Any]) -> Mapping[str, Any]:
        """Wait for the final report of the writing rank."""
        store, begun = self._group.store, time.monotonic()
        while (said := store.get(f"{key}/end", _LIVENESS_INTERVAL)) is None:
            rank, me = self._group.names[writer["place"]], self._group.names[self._group.place]
            if liveness.is_process_gone(writer):
                raise ReplicaError(
                    f"rank {rank} is no longer running: killed, or ended without a word, in polyamp.save, where rank "
                    f"{me} waits for it. {_PREVIOUS_INTACT}"
                )
            if time.monotonic() - begun > self._group.seconds:
                raise ReplicaError(
                    f"rank {rank} hangs: it writes in polyamp.save for more than {self._group.seconds:g} s, where rank "
                    f"{me} waits for it. {_PREVIOUS_INTACT}"
                )
        found: Mapping[str, Any] = json.loads(said)
        return found

    def _format_writer(self, said: Mapping[str, Any]) -> str:
        return self._group.format_ranks([int(said.get("place", 0))])

"""One file of a state that every rank holds whole: any of them may save it, alone or together with the others (S33).

Nobody knows whether the others call `save` too, so rank 0 never waits: it says on the store that it writes, and that it
has written. Another rank that saves waits for these words, and writes the same itself if they do not come.
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
from polyamp.rules import presence
from polyamp.rules.replicas import Group, lost_store, shortened

PATIENCE: Final = 5.0
"""Seconds that a rank waits for rank 0 to begin, before it writes itself."""
_INTERVAL: Final = 0.5
"""Seconds between two looks whether the rank that writes still runs."""
_WAITING: Final = "save/waiting"
_SERVED: Final = "save/served"
_KEPT: Final = "The checkpoint before is whole."


class SingleWriter:
    """The saves of one rank, by numbers that are the same on every rank that calls them all.

    Example:
        >>> from polyamp.rules.roll_call import Shelf
        >>> written = []
        >>> SingleWriter(Group(Shelf(), 0, (0, 1), 5.0)).write("run/state", "step 3", lambda: written.append(1), list)
        >>> written
        [1]
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._number: Counter[str] = Counter()
        self._point = ""
        self._wrote = False

    def write(self, path: str, point: str, put: Callable[[], None], look: Callable[[], Any]) -> None:
        """Have the file written by one rank; on return it is whole, on every rank that calls this.

        Args:
            path: as the user gave it.
            point: which state it is and where in the program the save stands, the same on every rank.
            put: writes the file, in one moment.
            look: what tells one content of the file from another, at this rank; None where there is no file.

        Raises:
            CheckpointError: the rank that wrote raised, which it names; or this rank does not see the file.
            ReplicaError: the rank that wrote was killed meanwhile, or hangs. The checkpoint before is whole.
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
        """Whether a rank waits for words of this one, whose process keeps the store."""
        store = self._group.store
        return self._wrote and store.add(_WAITING, 0) > store.add(_SERVED, 0)

    def _put(self, key: str, put: Callable[[], None]) -> None:
        """Write, and say so. What cannot be said, for the store is gone, does not stop a save."""
        self._wrote = True
        here: dict[str, Any] = {"place": self._group.place}
        self._say(f"{key}/begun", here | presence.own())
        try:
            put()
        except BaseException as error:
            self._say(f"{key}/end", {**here, "error": shortened(error)})
            raise
        self._say(f"{key}/end", here)

    def _say(self, key: str, what: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._group.store.set(key, json.dumps(what).encode())

    def _follow(self, key: str, path: str, put: Callable[[], None], look: Callable[[], Any]) -> None:
        store, before = self._group.store, look()
        writer: Mapping[str, Any] | None = None
        try:
            store.reach()
            store.add(_WAITING, 1)
            try:
                writer = self._writer(key)
                end = None if writer is None else self._end(key, writer)
            finally:
                store.add(_SERVED, 1)
        except OSError as error:
            if writer is not None and look() == before:  # else it was written, and whoever kept the store ended
                raise ReplicaError(f"{lost_store(self._group)} {_KEPT}") from error
            end = {} if writer is not None else None
        if end is None:
            self._put(key, put)
        elif "error" in end:
            raise CheckpointError(f"{self._called(end)} could not write {path}: {end['error']}")
        elif look() is None:
            raise CheckpointError(
                f"{path} is not there, though {self._called(writer or {})} wrote it. All ranks must see one path: on "
                "storage that they share; or let one rank alone call polyamp.save."
            )

    def _writer(self, key: str) -> Mapping[str, Any] | None:
        """Who writes; None if this rank is to."""
        store = self._group.store
        said = store.get(f"{key}/begun", PATIENCE)
        if said is None and store.add(f"{key}/claims", 1) > 1:
            said = store.get(f"{key}/begun", PATIENCE)
        found: Mapping[str, Any] | None = None if said is None else json.loads(said)
        return found

    def _end(self, key: str, writer: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the rank that writes says when it is through."""
        store, begun = self._group.store, time.monotonic()
        while (said := store.get(f"{key}/end", _INTERVAL)) is None:
            rank, me = self._group.names[writer["place"]], self._group.names[self._group.place]
            if presence.is_gone(writer):
                raise ReplicaError(
                    f"rank {rank} is no longer running: killed, or ended without a word, in polyamp.save, where rank "
                    f"{me} waits for it. {_KEPT}"
                )
            if time.monotonic() - begun > self._group.seconds:
                raise ReplicaError(
                    f"rank {rank} hangs: it writes in polyamp.save for more than {self._group.seconds:g} s, where rank "
                    f"{me} waits for it. {_KEPT}"
                )
        found: Mapping[str, Any] = json.loads(said)
        return found

    def _called(self, said: Mapping[str, Any]) -> str:
        return self._group.called([int(said.get("place", 0))])

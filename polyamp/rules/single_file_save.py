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
from polyamp.rules.rank_group import RankGroup, dead_ranks_message, format_error, lost_store_message

WRITER_TIMEOUT: Final = 5.0
"""Seconds that a rank waits for rank 0 to begin before it writes itself."""
_LIVENESS_INTERVAL: Final = 0.5
"""Seconds between two checks whether the writing rank still runs."""
_WAITING_KEY: Final = "save/waiting"
_SERVED_KEY: Final = "save/served"
_PREVIOUS_INTACT: Final = "The checkpoint before is whole."


class SingleWriter:
    """Saves of one rank, numbered consistently over the ranks that call all of them."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._saves: Counter[str] = Counter()
        self._position = ""
        self._wrote = False

    def write(self, path: str, position: str, write_file: Callable[[], None], file_version: Callable[[], Any]) -> None:
        """Have one rank write the file. On return it is complete for every rank that calls this.

        Args:
            path: the path as the user gave it.
            position: identifies the state and the position of the save in the program; the same on every rank.
            write_file: writes the file atomically.
            file_version: returns a value that changes with the file's content, as this rank sees it; None for no file.

        Raises:
            CheckpointError: the writing rank raised and is named; or this rank does not see the file.
            ReplicaError: the writing rank was killed or hangs. The previous checkpoint is intact.
        """
        if position != self._position:
            self._position = position
            self._saves.clear()
        self._saves[path] += 1
        name = json.dumps([path, position, self._saves[path]])
        key = f"save/{hashlib.sha256(name.encode()).hexdigest()[:24]}"
        if self._group.rank == 0 or not self._wait_for_writer(key, path, file_version):
            self._write_and_report(key, write_file)

    def is_needed(self) -> bool:
        """Whether another rank waits for reports of this one, whose process hosts the store."""
        store = self._group.store
        return self._wrote and store.add(_WAITING_KEY, 0) > store.add(_SERVED_KEY, 0)

    def _write_and_report(self, key: str, write_file: Callable[[], None]) -> None:
        """Write the file and report it. A report that fails because the store is gone does not stop the save."""
        self._wrote = True
        entry: dict[str, Any] = {"rank": self._group.rank}
        self._publish(f"{key}/begun", entry | liveness.process_identity())
        try:
            write_file()
        except BaseException as error:
            self._publish(f"{key}/end", {**entry, "error": format_error(error)})
            raise
        self._publish(f"{key}/end", entry)

    def _publish(self, key: str, entry: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._group.write(key, entry)

    def _wait_for_writer(self, key: str, path: str, file_version: Callable[[], Any]) -> bool:
        """Return True once another rank has written the file; False if this rank has to write it."""
        group, version_before = self._group, file_version()
        writer: Mapping[str, Any] | None = None
        end: Mapping[str, Any] = {}
        try:
            group.store.reach()
            group.store.add(_WAITING_KEY, 1)
            try:
                writer = self._find_writer(key)
                if writer is not None:
                    end = self._wait_for_end(key, writer)
            finally:
                group.store.add(_SERVED_KEY, 1)
        except OSError as error:
            # a changed file was written, and the host of the store ended
            if writer is not None and file_version() == version_before:
                raise ReplicaError(f"{lost_store_message(group)} {_PREVIOUS_INTACT}") from error
        if writer is None:
            return False
        if "error" in end:
            raise CheckpointError(f"{group.format_ranks([end['rank']])} could not write {path}: {end['error']}")
        if file_version() is None:
            raise CheckpointError(
                f"{path} is not there, though {group.format_ranks([writer['rank']])} wrote it. All ranks must see one "
                "path: on storage that they share; or let one rank alone call polyamp.save."
            )
        return True

    def _find_writer(self, key: str) -> Mapping[str, Any] | None:
        """Return the writing rank's report; None if this rank has to write."""
        writer: Mapping[str, Any] | None = self._group.read(f"{key}/begun", WRITER_TIMEOUT)
        if writer is None and self._group.store.add(f"{key}/claims", 1) > 1:
            writer = self._group.read(f"{key}/begun", WRITER_TIMEOUT)
        return writer

    def _wait_for_end(self, key: str, writer: Mapping[str, Any]) -> Mapping[str, Any]:
        """Wait for the final report of the writing rank."""
        group, begun = self._group, time.monotonic()
        rank, waits = group.global_ranks[writer["rank"]], f"where rank {group.global_rank} waits for it."
        while (end := group.read(f"{key}/end", _LIVENESS_INTERVAL)) is None:
            if liveness.is_process_gone(writer):
                raise ReplicaError(f"{dead_ranks_message([rank])}, in polyamp.save, {waits} {_PREVIOUS_INTACT}")
            if time.monotonic() - begun > group.seconds:
                raise ReplicaError(
                    f"rank {rank} hangs: it writes in polyamp.save for more than {group.seconds:g} s, {waits} "
                    f"{_PREVIOUS_INTACT}"
                )
        report: Mapping[str, Any] = end
        return report

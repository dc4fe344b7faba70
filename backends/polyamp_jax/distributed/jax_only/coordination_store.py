"""Key-value store over JAX's coordination service: processes wait in it for the one that writes a checkpoint (S33)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import jax

from polyamp.rules.rank_group import RankGroup
from polyamp.rules.single_file_save import SingleWriter
from polyamp_jax import compat

_PREFIX: Final = "polyamp/"
_LONGEST_WAIT: Final = 1800.0
"""Seconds that a process waits for the writing process. JAX itself ends it earlier if the writer has ended."""
_Value = TypeVar("_Value")


_writer_cache: Final[list[Any]] = []
"""The service's client and the writer that uses it."""


class CoordinationStore:
    """`RankStore` over JAX's coordination service, which ends with process 0. Process 0 waits for the others.

    Args:
        client: the service's client, whose calls have their own time limits.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def reach(self) -> None:
        """See `RankStore`."""

    def set(self, key: str, value: bytes) -> None:
        """See `RankStore`."""
        _call_service(lambda: self._client.key_value_set_bytes(_PREFIX + key, value, allow_overwrite=True))

    def get(self, key: str, seconds: float) -> bytes | None:
        """See `RankStore`."""
        try:
            found: bytes = self._client.blocking_key_value_get_bytes(_PREFIX + key, max(1, int(1000 * seconds)))
        except RuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise ConnectionError(str(error)) from error
        return found

    def add(self, key: str, number: int) -> int:
        """See `RankStore`. An older JAX has no counters: `number` is then returned, as for the first process."""
        count = getattr(self._client, "key_value_increment", None)
        return number if count is None else _call_service(lambda: int(count(_PREFIX + key, number)))


def coordination_writer() -> SingleWriter | None:
    """Return this process's single writer, or None if there is no coordination service."""
    client = compat.coordination_client()
    if client is None:
        return None
    if not _writer_cache or _writer_cache[0] is not client:
        group = RankGroup(CoordinationStore(client), jax.process_index(), range(jax.process_count()), _LONGEST_WAIT)
        _writer_cache[:] = [client, SingleWriter(group)]
    found: SingleWriter = _writer_cache[1]
    return found


def _call_service(call: Callable[[], _Value]) -> _Value:
    try:
        return call()
    except RuntimeError as error:
        raise ConnectionError(str(error)) from error

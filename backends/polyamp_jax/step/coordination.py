"""JAX's coordination service as the store that processes share, for saves by one of them (S33)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import jax

from polyamp.rules.replicas import Group
from polyamp.rules.single_writer import SingleWriter
from polyamp_jax import compat

_PREFIX: Final = "polyamp/"
_LONGEST: Final = 1800.0
"""Seconds that a process waits for another one that writes. JAX itself ends it earlier where that one is gone."""
_Value = TypeVar("_Value")


class CoordinationStore:
    """A `polyamp.rules.replicas.Store`. The service ends with process 0, which waits for the others when it ends.

    Args:
        client: of the service; its calls have limits of their own.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def reach(self) -> None:
        """See `Store`."""

    def set(self, key: str, value: bytes) -> None:
        """See `Store`."""
        _asked(lambda: self._client.key_value_set_bytes(_PREFIX + key, value, allow_overwrite=True))

    def get(self, key: str, seconds: float) -> bytes | None:
        """See `Store`."""
        try:
            found: bytes = self._client.blocking_key_value_get_bytes(_PREFIX + key, max(1, int(1000 * seconds)))
        except RuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise ConnectionError(str(error)) from error
        return found

    def add(self, key: str, number: int) -> int:
        """See `Store`. An older JAX has no counters: each process is then told that it is the first."""
        count = getattr(self._client, "key_value_increment", None)
        return number if count is None else _asked(lambda: int(count(_PREFIX + key, number)))


def writer() -> SingleWriter | None:
    """The saves of this process by one of all; None where there is no service."""
    client = compat.coordination_client()
    if client is None:
        return None
    if not _made or _made[0] is not client:
        group = Group(CoordinationStore(client), jax.process_index(), range(jax.process_count()), _LONGEST)
        _made[:] = [client, SingleWriter(group)]
    found: SingleWriter = _made[1]
    return found


_made: Final[list[Any]] = []
"""The service's client, and the writer that was made for it."""


def _asked(call: Callable[[], _Value]) -> _Value:
    try:
        return call()
    except RuntimeError as error:
        raise ConnectionError(str(error)) from error

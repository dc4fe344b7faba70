"""A scan over micro-batches that carries the parameters that their passes write (S12)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from polyamp_jax.arrays import named_leaves
from polyamp_jax.models.parameter_writes import Leaves
from polyamp_jax.models.parts import Running

Carry = tuple[Running, Any]


class UncarriedWriteError(Exception):
    """Raised while a scan is traced: a micro-batch writes parameters that the carry does not hold yet."""

    def __init__(self, paths: frozenset[str]) -> None:
        super().__init__(f"not carried: {sorted(paths)}")
        self.paths = paths


def check_carried(after: Leaves | None, before: Leaves | None) -> None:
    """Stop the trace of a scan whose carry lacks what a micro-batch writes.

    Raises:
        UncarriedWriteError: for `scan`, which begins again.
    """
    if missing := frozenset(after or {}) - frozenset(before or {}):
        raise UncarriedWriteError(missing)


def scan(body: Callable[[Carry, Any], tuple[Carry, Any]], carry: Carry, parts: Any, params: Any) -> tuple[Carry, Any]:
    """`jax.lax.scan(body, carry, parts)`. What the body writes to parameters is known when it is traced; then the scan
    is traced once more, with these in the carry.

    Args:
        body: calls `check_carried`.
        carry: running state, and whatever else is carried.
        parts: the micro-batches, stacked.
        params: the parameters as they are before the first write.
    """
    while True:
        try:
            made: tuple[Carry, Any] = jax.lax.scan(body, carry, parts)
            return made
        except UncarriedWriteError as found:
            running, rest = carry
            first = named_leaves(params)
            written = {**{path: first[path] for path in found.paths}, **(running.written or {})}
            carry = running._replace(written=written), rest

"""Scan over micro-batches that carries the parameters that their passes write (S12)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from polyamp_jax.arrays import named_leaves
from polyamp_jax.models.parameter_writes import NamedLeaves
from polyamp_jax.models.running_state import RunningState

ScanCarry = tuple[RunningState, Any]


class UncarriedWriteError(Exception):
    """Raised while a scan is traced: a micro-batch writes parameters that the carry does not contain yet."""

    def __init__(self, paths: frozenset[str]) -> None:
        super().__init__(f"not carried: {sorted(paths)}")
        self.paths = paths


def check_carry(after: NamedLeaves | None, before: NamedLeaves | None) -> None:
    """Stop the trace of a scan whose carry lacks what a micro-batch writes.

    Raises:
        UncarriedWriteError: caught by `scan_micro_batches`, which traces again.
    """
    if missing := frozenset(after or {}) - frozenset(before or {}):
        raise UncarriedWriteError(missing)


def scan_micro_batches(
    body: Callable[[ScanCarry, Any], tuple[ScanCarry, Any]], carry: ScanCarry, parts: Any, params: Any
) -> tuple[ScanCarry, Any]:
    """Run `jax.lax.scan(body, carry, parts)` with written parameters in the carry.

    Tracing shows which parameters the body writes. The scan is then traced once more with these in the carry.

    Args:
        body: the scanned function, which must call `check_carry`.
        carry: the running state and further carried values.
        parts: the micro-batches, stacked.
        params: the parameters before the first write.
    """
    while True:
        try:
            made: tuple[ScanCarry, Any] = jax.lax.scan(body, carry, parts)
            return made
        except UncarriedWriteError as found:
            running, rest = carry
            first = named_leaves(params)
            written = {**{path: first[path] for path in found.paths}, **(running.written or {})}
            carry = running._replace(written=written), rest

"""Errors of a collective in which another process did not take part."""

from __future__ import annotations

import re
from typing import Final

import jax

from polyamp.errors import ReplicaError
from polyamp.rules.rank_group import format_error, format_ranks

_COLLECTIVE_ERROR_PATTERN: Final = re.compile(r"(Gloo|NCCL) \S+ (failed|operation)|Gloo context initialization failed")


def other_process_error(error: Exception) -> ReplicaError | None:
    """Return the error to raise in place of a failed collective's, or None for any other error.

    With two processes the other one is named. With more, JAX does not report which one until its service misses it.
    """
    if not _COLLECTIVE_ERROR_PATTERN.search(str(error)) or jax.process_count() == 1:
        return None
    others = [number for number in range(jax.process_count()) if number != jax.process_index()]
    names = format_ranks(others).replace("ranks", "processes").replace("rank", "process")
    reason = "ended, raised or was killed" if len(others) == 1 else "did not all take part: one ended, raised or died"
    return ReplicaError(
        f"{names} {reason}: a collective of process {jax.process_index()} failed ({format_error(error, 200)}). Look at "
        "what the others printed. Start all processes again and polyamp.restore the last checkpoint: this state is not "
        "to be used again."
    )

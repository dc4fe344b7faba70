"""Protocols for `save` and `restore` of states in several processes: `HasShardedState` and `ShardedState`.

`HasCollectiveCalls` and `HasReplicas` are optional protocols of its `StateProcesses`.

A backend that never trains in several processes needs none of them: `UnshardedState` of
`polyamp.train.checkpoint_processes` is one process with the whole state, and gives every backend the folder form (S33).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


class ArrayForm(NamedTuple):
    """Dtype and shape of an array, without its values.

    Attributes:
        dtype: name of its dtype in NumPy and ml_dtypes ("float32", "bfloat16").
        shape: shape of the whole array, even if it is sharded.
    """

    dtype: str
    shape: tuple[int, ...]


class StateProcesses(Protocol):
    """Processes that share a state."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""

    @property
    def count(self) -> int:
        """Number of processes."""

    def gather(self, message: bytes) -> list[bytes]:
        """Return the bytes that each process passes, by rank. Every process calls it; lengths may differ.

        Raises:
            ReplicaError: a process ended, or did not answer in time.
        """


@runtime_checkable
class HasCollectiveCalls(Protocol):
    """Optional protocol of `StateProcesses`: a barrier before anything is sent."""

    def collective_call(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that is entered once every process has reached it.

        Args:
            what: the call as users write it: "polyamp.save".

        Raises:
            ReplicaError: names a process that did not arrive, or that ended within the block.
        """


@runtime_checkable
class HasReplicas(Protocol):
    """Optional protocol of `StateProcesses` that all hold the whole state: any of them may save it alone (S33)."""

    def write_by_one(self, path: str, write_file: Callable[[], None], file_version: Callable[[], Any]) -> None:
        """Have one of the calling processes write a file, without knowing which processes call.

        See `polyamp.rules.single_file_save.SingleWriter.write`.
        """


class ShardedState(Protocol):
    """State between two steps as its processes store it, sharded or whole.

    The backend's `import_state` accepts the result of `read`, and whole NumPy arrays, of which each process takes its
    shard.
    """

    @property
    def processes(self) -> StateProcesses:
        """The participating processes."""

    @property
    def replica(self) -> tuple[int, int]:
        """(rank, count) for random streams; processes with the same rank must draw the same numbers."""

    @property
    def arrays(self) -> Mapping[str, Array | ArrayForm]:
        """Every array of the state except `own`, by its name in `export_state`. 0-dim arrays, and those that
        `setting_of` knows, have values; for others the form suffices."""

    @property
    def own(self) -> Mapping[str, Array]:
        """Arrays with a separate value per process, of the same form on all: random-number streams."""

    def whole(self) -> dict[str, Array]:
        """Return `export_state` with this process's `own` arrays. Every process calls it."""

    def write(self, folder: Path, more: Mapping[str, Array]) -> None:
        """Write `arrays`, and `more`, which is equal everywhere, into an empty folder that all processes see.

        Every process calls it, and an error in one is raised in all. On return all files are written.
        """

    def read(self, folder: Path, forms: Mapping[str, ArrayForm]) -> dict[str, Any]:
        """Return the arrays that `write` wrote, in new memory. Every process calls it; the state does not change.

        0-dim arrays, `more`, and those with values in `arrays` are NumPy arrays; the others suit `import_state`.

        Raises:
            CheckpointError: the files do not match `forms`.
        """

    def new_stream(self, name: str, seed: int) -> Array:
        """Return a new stream in place of `own[name]`, determined by a seed of 64 bits."""


@runtime_checkable
class HasShardedState(Protocol):
    """Optional protocol: a backend whose states may be sharded over several processes; see `ShardedState`."""

    def sharded_state(self, state: Any) -> contextlib.AbstractContextManager[ShardedState]:
        """Return a context with the state, in which no step runs. Entering is cheap: nothing is copied or sent."""

"""The processes of `jax.distributed`, as `polyamp.save` and `polyamp.restore` use them (S33)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from polyamp.errors import ReplicaError
from polyamp.rules.single_file_save import SingleWriter
from polyamp_jax.distributed.jax_only.collective_errors import other_process_error


class JaxProcesses:
    """`StateProcesses` of `jax.distributed`."""

    def __init__(self) -> None:
        self.rank = jax.process_index()
        self.count = jax.process_count()

    def gather(self, message: bytes) -> list[bytes]:
        """Return the message of each process, by rank.

        Raises:
            ReplicaError: a process ended, or did not respond in time.
        """
        try:
            lengths = np.asarray(multihost_utils.process_allgather(np.asarray([len(message)], np.int32))).ravel()
            padded = np.zeros(max(1, int(lengths.max())), np.uint8)
            padded[: len(message)] = np.frombuffer(message, np.uint8)
            every = np.asarray(multihost_utils.process_allgather(padded)).reshape(self.count, -1)
        except (RuntimeError, ValueError) as error:
            if other_process_error(error) is not None:  # `collective_call` reports which process
                raise
            raise ReplicaError(
                f"process {self.rank} heard nothing of another one while a checkpoint was saved or restored: that one "
                f"ended, or hangs ({error}). The last complete checkpoint is whole; start all anew from it."
            ) from error
        return [row[:length].tobytes() for row, length in zip(every, lengths, strict=True)]

    @contextlib.contextmanager
    def collective_call(self, what: str) -> Iterator[None]:
        """Run a call that needs every process, and name a process that has ended (`HasCollectiveCalls`)."""
        try:
            yield
        except Exception as error:
            parted = other_process_error(error)
            if parted is None:
                raise
            raise ReplicaError(f"{parted} (In {what}; the last complete checkpoint is whole.)") from error


class JaxReplicatedProcesses(JaxProcesses):
    """Processes of a state that is fully replicated on every process."""

    def __init__(self, state: Any, writer: SingleWriter) -> None:
        super().__init__()
        self._state, self._writer = state, writer

    def write_by_one(self, path: str, write_file: Callable[[], None], file_version: Callable[[], Any]) -> None:
        """See `polyamp.contract.sharded_state.HasReplicas`."""
        self._writer.write(path, str(int(np.asarray(self._state.step))), write_file, file_version)

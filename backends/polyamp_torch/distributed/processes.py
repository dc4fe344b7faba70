"""The processes of a process group, as `polyamp.save` and `polyamp.restore` use them (S33)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch.distributed as dist


class TorchProcesses:
    """The processes of a process group, for `polyamp.save` and `polyamp.restore`.

    Args:
        replicas: the state's replicas.
    """

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas
        self._group = replicas.group
        self.rank = dist.get_rank(self._group)
        self.count = dist.get_world_size(self._group)

    def gather(self, message: bytes) -> list[bytes]:
        """Return every rank's bytes, by rank.

        If a rank ended or timed out, torch's error is raised; `collective_call` makes a ReplicaError of it."""
        every: list[Any] = [None] * self.count
        dist.all_gather_object(every, message, group=self._group)
        return every

    def collective_call(self, what: str) -> contextlib.AbstractContextManager[None]:
        """See `polyamp.contract.sharded_state.HasCollectiveCalls`."""
        guard = self._replicas.guard
        block: contextlib.AbstractContextManager[None]
        block = contextlib.nullcontext() if guard is None else guard.collective_call(what)
        return block


class TorchReplicaProcesses(TorchProcesses):
    """The processes of `DistributedDataParallel`, which all store the same values."""

    def write_by_one(self, path: str, write_file: Callable[[], None], file_version: Callable[[], Any]) -> None:
        """See `polyamp.contract.sharded_state.HasReplicas`."""
        guard = self._replicas.guard
        if guard is None:
            write_file()
            return
        board = guard.board
        guard.writer.write(
            path, f"{self._replicas.number} {board.steps_begun} {board.calls_begun}", write_file, file_version
        )

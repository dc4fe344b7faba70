"""The processes of a strategy with several workers, as `polyamp.save` and `polyamp.restore` use them (S33)."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from polyamp.errors import ReplicaError


class TensorFlowProcesses:
    """`StateProcesses` of a strategy with several workers."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        resolver = strategy.cluster_resolver
        tasks = resolver.cluster_spec().as_dict()
        chiefs = len(tasks.get("chief", ()))
        self.count = chiefs + len(tasks.get("worker", ()))
        self.rank = int(resolver.task_id) + (chiefs if resolver.task_type == "worker" else 0)

    def gather(self, message: bytes) -> list[bytes]:
        """Return the bytes of every process, by rank.

        Raises:
            ReplicaError: a process ended, or did not answer in time.
        """
        longest = max(int(row[1]) for row in self._rows(np.asarray([self.rank, len(message)], np.int32)))
        padded = np.zeros(longest + 2, np.int32)  # collectives take no bytes
        padded[:2] = self.rank, len(message)
        padded[2 : 2 + len(message)] = np.frombuffer(message, np.uint8)
        by_rank = {int(row[0]): row[2 : 2 + int(row[1])].astype(np.uint8).tobytes() for row in self._rows(padded)}
        return [by_rank[rank] for rank in range(self.count)]

    def _rows(self, own: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return one row per replica; those of one worker are equal."""

        def body() -> Any:
            return tf.distribute.get_replica_context().all_gather(tf.constant(own[None]), axis=0)

        try:
            found = self._strategy.run(tf.function(body))
            return np.asarray(self._strategy.experimental_local_results(found)[0])
        except tf.errors.OpError as error:
            raise ReplicaError(
                f"worker {self.rank} heard nothing of another one while a checkpoint was saved or restored: that one "
                f"ended, or hangs ({error.message}). The last complete checkpoint is whole; start all anew from it."
            ) from error

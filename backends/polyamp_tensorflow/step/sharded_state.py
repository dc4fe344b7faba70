"""State of several processes, for their checkpoints (S33).

Every worker of a `MultiWorkerMirroredStrategy` has the complete state, random streams included, so only the chief
writes. The replicas of one process count as one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from polyamp.contract.sharded_state import ShardedState
from polyamp.errors import ReplicaError
from polyamp.train.checkpoint_processes import ReplicatedState, UnshardedState
from polyamp_tensorflow.step.state import TensorFlowState


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


@contextlib.contextmanager
def sharded_state(state: TensorFlowState) -> Iterator[ShardedState]:
    """Context manager that yields the sharded state while no step runs."""
    with state.exclusive_access():
        several = isinstance(state.strategy, tf.distribute.MultiWorkerMirroredStrategy)
        workers = TensorFlowProcesses(state.strategy) if several else None
        yield UnshardedState(state) if workers is None or workers.count == 1 else ReplicatedState(state, workers)

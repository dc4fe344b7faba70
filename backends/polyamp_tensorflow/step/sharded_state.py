"""State of several processes, for their checkpoints (S33).

Every worker of a `MultiWorkerMirroredStrategy` has the complete state, random streams included, so only the chief
writes. The replicas of one process count as one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from polyamp.contract.sharded_state import ShardedState
from polyamp.train.checkpoint_processes import ReplicatedState, UnshardedState
from polyamp_tensorflow.distributed.processes import TensorFlowProcesses
from polyamp_tensorflow.step.state import TensorFlowState


@contextlib.contextmanager
def sharded_state(state: TensorFlowState) -> Iterator[ShardedState]:
    """Context manager that yields the sharded state while no step runs."""
    with state.exclusive_access():
        several = isinstance(state.strategy, tf.distribute.MultiWorkerMirroredStrategy)
        workers = TensorFlowProcesses(state.strategy) if several else None
        yield UnshardedState(state) if workers is None or workers.count == 1 else ReplicatedState(state, workers)

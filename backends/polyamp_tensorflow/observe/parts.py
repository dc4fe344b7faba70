"""What the replicas of a strategy give, put together as one device would have it. Called by `watching`."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from polyamp.parity.observing import See, What
from polyamp_tensorflow.arrays import leaves

Array = np.ndarray[Any, Any]


class Parts:
    """Arrays of replicas, which go on when all replicas have given theirs; of one replica at once.

    Each replica has a part of the batch, and its loss is the mean over its own part.

    Args:
        see: gets the whole ones.
        replicas: how many there are in this process.
        rows: of the batch that each replica has.
    """

    def __init__(self, see: See, replicas: int, rows: int) -> None:
        self._see, self._replicas, self._rows = see, replicas, rows
        self._waiting: dict[tuple[str, What], tuple[str, dict[int, Array]]] = {}

    def see(self, replica: int, path: str, what: What, array: Array, dtype: str) -> None:
        """What a replica gives."""
        if self._replicas == 1:
            self._see(path, what, array, dtype)
            return
        _, parts = self._waiting.setdefault((path, what), (dtype, {}))
        parts[replica] = np.array(array)
        if len(parts) == self._replicas:
            self._go(path, what)

    def finish(self) -> None:
        """What some replicas alone have given."""
        for path, what in list(self._waiting):
            self._go(path, what)

    def _go(self, path: str, what: What) -> None:
        dtype, parts = self._waiting.pop((path, what))
        self._see(path, what, self._whole([parts[replica] for replica in sorted(parts)], what), dtype)

    def _whole(self, parts: list[Array], what: What) -> Array:
        """Along the batch; what has no rows is the same in all replicas, and its cotangent the mean."""
        first = parts[0]
        if first.ndim and first.shape[0] and first.shape[0] % self._rows == 0:
            whole = np.concatenate(parts)
            return whole / whole.dtype.type(len(parts)) if what == "cotangent" else whole
        return np.mean(parts, axis=0, dtype=first.dtype) if what == "cotangent" else first


def rows_of_a_replica(batch: Any, replicas: int) -> int:
    """Rows of the batch that each replica gets."""
    lengths = [leaf.shape[0] for _, leaf in leaves(batch) if len(getattr(leaf, "shape", ())) > 0]
    return max(int(lengths[0]) // replicas, 1) if lengths else 1


def replica() -> tuple[int, int]:
    """The number of the replica that runs, and how many there are; (0, 1) outside of a strategy."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return 0, 1
    number = context.replica_id_in_sync_group
    known = tf.get_static_value(number) if tf.is_tensor(number) else number
    assert known is not None, "a replica's number is known when a step is traced"
    return int(known), int(context.num_replicas_in_sync)

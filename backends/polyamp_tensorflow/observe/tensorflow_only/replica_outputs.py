"""Outputs of the replicas of a strategy, merged as if from one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from polyamp.parity.trace.observer import CaptureCallback, CaptureKind
from polyamp_keras.arrays import leaves_with_paths

Array = np.ndarray[Any, Any]


class ReplicaOutputs:
    """Buffer that merges the arrays of replicas and passes them on once all have reported; with one replica, at once.

    Each replica has a part of the batch, and its loss is the mean over its own part.

    Args:
        on_capture: called with the merged arrays.
        replicas: number of replicas in this process.
        rows: rows of the batch per replica.
    """

    def __init__(self, on_capture: CaptureCallback, replicas: int, rows: int) -> None:
        self._see, self._replicas, self._rows = on_capture, replicas, rows
        self._waiting: dict[tuple[str, CaptureKind], tuple[str, dict[int, Array]]] = {}

    def on_capture(self, replica: int, path: str, what: CaptureKind, array: Array, dtype: str) -> None:
        """Add the array of a replica."""
        if self._replicas == 1:
            self._see(path, what, array, dtype)
            return
        _, parts = self._waiting.setdefault((path, what), (dtype, {}))
        parts[replica] = np.array(array)
        if len(parts) == self._replicas:
            self._emit(path, what)

    def finish(self) -> None:
        """Pass on the arrays that only some replicas have reported."""
        for path, what in list(self._waiting):
            self._emit(path, what)

    def _emit(self, path: str, what: CaptureKind) -> None:
        dtype, parts = self._waiting.pop((path, what))
        self._see(path, what, self._merge_replicas([parts[replica] for replica in sorted(parts)], what), dtype)

    def _merge_replicas(self, parts: list[Array], what: CaptureKind) -> Array:
        """Concatenate along the batch. Arrays without rows are equal on all replicas; their cotangents are averaged."""
        first = parts[0]
        if first.ndim and first.shape[0] and first.shape[0] % self._rows == 0:
            whole = np.concatenate(parts)
            return whole / whole.dtype.type(len(parts)) if what == "cotangent" else whole
        return np.mean(parts, axis=0, dtype=first.dtype) if what == "cotangent" else first


def rows_per_replica(batch: Any, replicas: int) -> int:
    """Return the rows of the batch per replica."""
    lengths = [leaf.shape[0] for _, leaf in leaves_with_paths(batch) if len(getattr(leaf, "shape", ())) > 0]
    return max(int(lengths[0]) // replicas, 1) if lengths else 1


def current_replica() -> tuple[int, int]:
    """Return the index of the running replica and the number of replicas; (0, 1) outside a strategy."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return 0, 1
    number = context.replica_id_in_sync_group
    known = tf.get_static_value(number) if tf.is_tensor(number) else number
    assert known is not None, "a replica's number is known when a step is traced"
    return int(known), int(context.num_replicas_in_sync)

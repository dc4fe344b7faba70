"""Global random state of Keras and TensorFlow."""

from __future__ import annotations

from polyamp_tensorflow.arrays import to_numpy
from polyamp_tensorflow.compat import global_seed_variable, operation_seed_source
from polyamp_tensorflow.porting.fill import assign


class GlobalRandomState:
    """Snapshot of Keras's global generator and TensorFlow's operation seeds. The state of a kernel that has run is
    inside the kernel and not included."""

    def __init__(self) -> None:
        self._keras = global_seed_variable()
        self._values = None if self._keras is None else to_numpy(self._keras)
        self._seeds = operation_seed_source()
        self._place = None if self._seeds is None else self._seeds.getstate()

    def restore(self) -> None:
        """Restore the snapshot; a generator that was created since stays."""
        if self._values is not None:
            assign(self._keras, self._values)
        if self._seeds is not None and self._place is not None:
            self._seeds.setstate(self._place)

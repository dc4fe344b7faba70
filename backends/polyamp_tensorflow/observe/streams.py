"""The random streams that belong to no model. Called by `working` and `watching`."""

from __future__ import annotations

from polyamp_tensorflow.arrays import to_numpy
from polyamp_tensorflow.compat import global_seed, operation_seeds
from polyamp_tensorflow.porting.fill import assign


class Streams:
    """Where Keras's global generator and TensorFlow's seeds of operations stand; that of a kernel that has run is in
    the kernel, out of reach."""

    def __init__(self) -> None:
        self._keras = global_seed()
        self._values = None if self._keras is None else to_numpy(self._keras)
        self._seeds = operation_seeds()
        self._place = None if self._seeds is None else self._seeds.getstate()

    def put_back(self) -> None:
        """As it was; a generator that came since stays."""
        if self._values is not None:
            assign(self._keras, self._values)
        if self._seeds is not None and self._place is not None:
            self._seeds.setstate(self._place)

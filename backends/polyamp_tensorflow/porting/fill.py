"""A model's variables take other values: all of them, or none. Called by `converter`.

Every array is read before the first is written (`undo.ahead`). Only one that has to be read again can fail later; what
those overwrite is kept, and they come first.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import numpy as np
import tensorflow as tf

from polyamp.errors import PortError, did_you_mean
from polyamp.porting.layouts.lazy import Lazy
from polyamp.porting.undo import Undo, ahead
from polyamp_tensorflow.arrays import raw
from polyamp_tensorflow.models.layers import modules
from polyamp_tensorflow.porting.walk import Found, lazy, read


def fill(model: Any, found: Found, leaves: Mapping[str, Lazy]) -> None:
    """Assign each value to the variable of its name; what was assigned is put back where one cannot be read.

    Raises:
        PortError: an unknown name, or another shape or dtype than the variable's; nothing was changed.
    """
    for name, given in leaves.items():
        if name not in found.variables:
            raise PortError(
                f"the Keras model has no variable {name!r}.{did_you_mean(name, found.variables)} Received values for "
                f"{len(leaves)} of its {len(found.variables)}."
            )
        there = lazy(found.variables[name])
        if (there.shape, there.dtype) != (given.shape, given.dtype):
            raise PortError(
                f"variable {name!r} is {there.dtype}{list(there.shape)}. Received: {given.dtype}{list(given.shape)}."
            )
    held = ahead(leaves)
    with uninterrupted(), Undo() as undo:
        try:
            for name in list(held):
                values = held.pop(name)  # a mapped file's pages are let go one array after another
                if values is None:
                    values = leaves[name].read()
                    undo.keep(name, read(found.variables[name]))
                assign(found.variables[name], values)
            _follow(model)
        except BaseException:
            for name, values in undo:
                assign(found.variables[name], values)
            _follow(model)
            raise


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """A Ctrl-C waits for the end of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals come to the main thread alone
        return
    came: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda *received: came.append(received))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came and callable(before):
            before(*came[0])


def assign(variable: Any, values: np.ndarray[Any, Any]) -> None:
    """Give a variable these values; under a distribution strategy, all of its copies. The array is copied."""
    raw(variable).assign(_tensor(values))


def _tensor(values: np.ndarray[Any, Any]) -> Any:
    """The values as a tensor. TensorFlow moves the axes of a transposed array several times as fast as NumPy."""
    if values.flags.c_contiguous or values.ndim < 2:
        return values
    order = sorted(range(values.ndim), key=lambda axis: -values.strides[axis])
    straight = values.transpose(order)
    if not straight.flags.c_contiguous:
        return values
    back = sorted(range(values.ndim), key=order.__getitem__)
    return tf.transpose(tf.convert_to_tensor(straight), back)


def _follow(model: Any) -> None:
    """Let layers that compute with copies of their variables, as Normalization does, take them anew."""
    for module in modules(model):
        if hasattr(module.layer, "finalize_state"):
            module.layer.finalize_state()

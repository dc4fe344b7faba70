"""In-place assignment of values to a model's variables. Either all variables are written, or the model is unchanged."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import numpy as np

from polyamp.errors import PortError, did_you_mean
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp.porting.rollback import read_ahead, write_all
from polyamp_keras.arrays import native_variable
from polyamp_keras.engine import ENGINE
from polyamp_keras.models.layers import list_layers
from polyamp_keras.porting.inventory import read_keras_model, to_lazy
from polyamp_keras.precision.bound_model import native_model


def fill(model: Any, leaves: Mapping[str, Lazy]) -> Any:
    """Assign each value to the variable of its name, and return the model. If an array cannot be read, all assignments
    are undone.

    Raises:
        PortError: a name is unknown, or a shape or dtype differs from the variable's; nothing was changed.
    """
    native = native_model(model)
    found = read_keras_model(native)
    for name, given in leaves.items():
        if name not in found.variables:
            raise PortError(
                f"the Keras model has no variable {name!r}.{did_you_mean(name, found.variables)} Received values for "
                f"{len(leaves)} of its {len(found.variables)}."
            )
        there = to_lazy(found.variables[name])
        if (there.shape, there.dtype) != (given.shape, given.dtype):
            raise PortError(
                f"variable {name!r} is {there.dtype}{list(there.shape)}. Received: {given.dtype}{list(given.shape)}."
            )
    writes = read_ahead(leaves)
    with defer_interrupts():
        try:
            write_all(
                writes,
                lambda name: ENGINE.host_values(found.variables[name]),
                lambda name, values: assign(found.variables[name], values),
            )
        finally:
            _refresh_copies(native)
    return model


@contextlib.contextmanager
def defer_interrupts() -> Iterator[None]:
    """Context manager that defers Ctrl-C to the end of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives signals
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
    """Assign values to a variable; under a distribution strategy, to all of its copies. The array is copied."""
    native = native_variable(variable)
    (native if hasattr(native, "assign") else variable).assign(ENGINE.from_host(values))


def _refresh_copies(model: Any) -> None:
    """Refresh layers that compute with copies of their variables, as Normalization does."""
    for module in list_layers(model):
        if hasattr(module.layer, "finalize_state"):
            module.layer.finalize_state()

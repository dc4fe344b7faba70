"""What a module gave, marked, and classes of modules that mark it. Called by the other modules of this room."""

from __future__ import annotations

import functools
from typing import Any

import jax

from polyamp_jax import compat
from polyamp_jax.precision.interpreter.seen import shown


def given(output: Any, path: str) -> Any:
    """What a module gave, its array marked: of several the first that stands by itself, which of a cell that gives its
    carry beside it is the output."""
    if isinstance(output, jax.Array):
        return shown(output, path)
    if isinstance(output, list | tuple):
        number = next((number for number, item in enumerate(output) if isinstance(item, jax.Array)), None)
        if number is None:
            return output
        items = [shown(item, path) if place == number else item for place, item in enumerate(output)]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    if type(output) is dict:
        name = next((name for name, item in output.items() if isinstance(item, jax.Array)), None)
        return {key: shown(item, path) if key == name else item for key, item in output.items()}
    return output


def of_sequence(output: Any, cell: str, path: str) -> Any:
    """What an RNN of flax gave, which is marked as what its cell gave too: that runs in a scan, and is the layer."""
    if isinstance(output, tuple) and len(output) == 2:
        return output[0], shown(shown(output[1], cell), path)
    return shown(shown(output, cell), path)


@functools.lru_cache(maxsize=4096)
def marking_class(kind: Any, path: str) -> type:
    """A subclass whose calls mark what they give, one for each class and path: JAX keeps such classes for ever."""

    @functools.wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = kind.__call__(self, *args, **kwargs)
        if compat.is_a(self, "flax.nnx", "RNN"):
            return of_sequence(output, f"{path}/cell", path)
        return given(output, path)

    names = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    made: type = type(kind)(kind.__name__, (kind,), names)
    return made

"""Per-module casting for libraries whose modules are objects (nnx, equinox): a subclass that casts its arguments.

These libraries have no hook around a module's call, and Python looks `__call__` up on the class; so inside the step,
on copies that live for one trace, a module gets a subclass of its own class. Called by the adapters.
"""

from __future__ import annotations

import functools
from typing import Any

from polyamp_jax.arrays import cast
from polyamp_jax.models import Casts


def set_class(module: Any, path: str, casts: Casts, *, inputs: str | None = None, outputs: str | None = None) -> None:
    """Make `module` cast its floating arguments to its dtype (S5), in place.

    Args:
        module: a module that belongs to polyamp alone, never the user's own.
        path: its path.
        casts: which dtype each module has.
        inputs: dtype of the inputs of a pinned module, in place of what `casts` says.
        outputs: dtype of the outputs of a pinned module, or None to leave them.
    """
    if inputs is None:
        if path not in casts.dtypes:
            return
        casts.arguments(path, (), {}, getattr(module, "dtype", None))
    dtype = inputs or casts.dtypes[path]
    own: Any = type(module)
    kind = _casting(own, dtype, outputs, casts.policy.casts_float64)
    object.__setattr__(module, "__class__", kind)


@functools.cache
def _casting(kind: type, inputs: str, outputs: str | None, float64: bool) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast((args, kwargs), inputs, float64=float64)
        result = kind.__call__(self, *args, **kwargs)
        return result if outputs is None else cast(result, outputs, float64=float64)

    names = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    made: type = type(kind)(kind.__name__, (kind,), names)
    return made

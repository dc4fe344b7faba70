"""`backend_of`: the backend of an array or a model, for eager and for compiled code.

torch.compile cannot trace the search that `registry` makes. So it runs `_name_for` as it traces, takes the name for a
constant, and finds the backend where it can hold on to it. Called by `losses` and `train.parameters`.
"""

from __future__ import annotations

from typing import Any

from polyamp.contract import registry
from polyamp.contract.backend import Backend

_asked: dict[str, Backend] = {}
"""The backends that were asked so far, by their names."""


def backend_of(found: Any) -> Backend:
    """The backend of an array, a model or a state.

    Raises:
        BackendError: no backend recognises it.
    """
    name = _name_for(type(found))
    return registry.backend_for(found) if name is None else _asked[name]


def _name_for(kind: type) -> str | None:
    """The backend's name in `_asked`; None where not the type but only the object can tell."""
    backend = registry.backend_of_type(kind)
    if backend is None:
        return None
    return _asked.setdefault(backend.name, backend).name


# The mark of torch.compiler.assume_constant_result, which imports torch; to every other framework it says nothing.
_name_for._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a function takes any attribute

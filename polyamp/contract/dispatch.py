"""`backend_of`: backend of an array or a model, in eager and in compiled code.

torch.compile cannot trace the registry's search. So it runs `_backend_name` while tracing and treats the name as a
constant, which indexes a dictionary of loaded backends.
"""

from __future__ import annotations

from typing import Any

from polyamp.contract import registry
from polyamp.contract.backend import Backend

_loaded_backends: dict[str, Backend] = {}
"""Backends used so far, by name."""


def backend_of(found: Any) -> Backend:
    """Return the backend of an array, a model or a state.

    Raises:
        BackendError: no backend recognises it.
    """
    name = _backend_name(type(found))
    return registry.backend_for(found) if name is None else _loaded_backends[name]


def _backend_name(kind: type) -> str | None:
    """Return the backend's name in `_loaded_backends`; None if the type does not determine it."""
    backend = registry.backend_of_type(kind)
    if backend is None:
        return None
    return _loaded_backends.setdefault(backend.name, backend).name


# What torch.compiler.assume_constant_result sets, without the import of torch. Other frameworks ignore it.
_backend_name._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a function takes any attribute

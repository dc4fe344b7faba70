"""`register`: a form for a layer that polyamp does not know, by its class.

Backends ask `form_of` before they look into their own tables, so that a third party may also replace one of those. A
distribution brings its forms under the entry-point group `polyamp.porting`: the entry's name is the root module of the
layers' package, its value a module that calls `register`; it is imported once the root is in `sys.modules`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from polyamp.errors import BackendError, PortError, described
from polyamp.porting.layouts.forms import Form

GROUP: Final = "polyamp.porting"
Reader = Callable[[Any], Form]
"""A layer object -> its form; the rules name the layer's own parameters and buffers."""

_forms: dict[str, Reader] = {}
"""Qualified name of a class -> what reads its form."""
_ReaderT = TypeVar("_ReaderT", bound=Reader)


def register(layer: type | str) -> Callable[[_ReaderT], _ReaderT]:
    """Decorates a function that gives the form of a layer class of yours.

    Args:
        layer: the class, or its qualified name ("package.module.Class"), which need not be imported. A form holds for
            subclasses too, unless those have one of their own.

    Returns:
        A decorator, which gives the function back as it is. It is called with the layer object and returns a `Form`.

    Raises:
        PortError: neither a class nor a qualified name, or the class has a form already.

    Example:
        >>> from polyamp import porting
        >>> class Scaled: ...
        >>> @porting.register(Scaled)
        ... def scaled(layer):
        ...     return porting.Form("dense", porting.same("kernel"), {"activation": "linear"})
        >>> form_of(Scaled()).kind
        'dense'
    """
    if not isinstance(layer, type) and not (isinstance(layer, str) and "." in layer):
        raise PortError(
            "register takes a layer's class, or its qualified name such as 'package.module.Class'. Received: "
            f"{described(layer)}."
        )
    name = layer if isinstance(layer, str) else qualified(layer)

    def decorate(reader: _ReaderT) -> _ReaderT:
        if _forms.setdefault(name, reader) is not reader:
            raise PortError(f"{name} has a form already, by {_forms[name].__module__}.{_forms[name].__qualname__}.")
        return reader

    return decorate


def form_of(layer: object) -> Form | None:
    """The registered form of a layer; None if its class has none.

    Raises:
        PortError: what was registered returned something else.
    """
    for kind in type(layer).__mro__:
        _load(kind.__module__.partition(".")[0])
        reader = _forms.get(qualified(kind))
        if reader is None:
            continue
        form = reader(layer)
        if not isinstance(form, Form):
            raise PortError(f"the form registered for {qualified(kind)} is no Form. Received: {described(form)}.")
        return form
    return None


def qualified(kind: type) -> str:
    """The name by which a class is registered.

    >>> qualified(Form)
    'polyamp.porting.layouts.forms.Form'
    """
    return f"{kind.__module__}.{kind.__qualname__}"


@functools.cache
def _entries() -> Mapping[str, Any]:
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=GROUP)}


@functools.cache
def _load(root: str) -> None:
    entry = _entries().get(root)
    if entry is None or root not in sys.modules:
        return
    try:
        entry.load()
    except Exception as error:
        name = entry.dist.name if entry.dist is not None else "an unknown distribution"
        raise BackendError(
            f"the forms of {root!r} (entry point {entry.value!r} of {name}) fail to import: {type(error).__name__}: "
            f"{error}. Reinstall or remove {name}."
        ) from error

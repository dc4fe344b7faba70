"""`register`, which adds the form of a layer class that polyamp does not know.

Backends call `registered_form` before they use their own tables, so that a third party may also replace built-in forms.
A distribution provides its forms under the entry-point group `polyamp.porting`. The entry's name is the root module of
the layers' package, its value a module that calls `register`. The module is imported once the root is in `sys.modules`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from polyamp.errors import BackendError, PortError, describe_value
from polyamp.porting.layouts.layer_layout import Form

ENTRY_POINT_GROUP: Final = "polyamp.porting"
FormReader = Callable[[Any], Form]
"""Function from a layer object to its form; the rules name the layer's own parameters and buffers."""

_forms: dict[str, FormReader] = {}
"""Qualified name of a class -> its form reader."""
_ReaderT = TypeVar("_ReaderT", bound=FormReader)


def register(layer: type | str) -> Callable[[_ReaderT], _ReaderT]:
    """Register a function that returns the form of a layer class; a decorator.

    Args:
        layer: the class, or its qualified name ("package.module.Class"), which need not be imported. A form applies to
            subclasses too, unless they have their own.

    Returns:
        A decorator that returns the function unchanged. The function is called with the layer and returns a `Form`.

    Raises:
        PortError: `layer` is neither a class nor a qualified name, or the class already has a form.

    Example:
        >>> from polyamp import porting
        >>> class Scaled: ...
        >>> @porting.register(Scaled)
        ... def scaled(layer):
        ...     return porting.Form("dense", porting.same("kernel"), {"activation": "linear"})
        >>> registered_form(Scaled()).kind
        'dense'
    """
    if not isinstance(layer, type) and not (isinstance(layer, str) and "." in layer):
        raise PortError(
            "register takes a layer's class, or its qualified name such as 'package.module.Class'. Received: "
            f"{describe_value(layer)}."
        )
    name = layer if isinstance(layer, str) else qualified_name(layer)

    def decorate(reader: _ReaderT) -> _ReaderT:
        if _forms.setdefault(name, reader) is not reader:
            raise PortError(f"{name} has a form already, by {_forms[name].__module__}.{_forms[name].__qualname__}.")
        return reader

    return decorate


def registered_form(layer: object) -> Form | None:
    """Return the registered form of a layer; None if its class has none.

    Raises:
        PortError: the registered function did not return a `Form`.
    """
    for kind in type(layer).__mro__:
        _load_entry_points(kind.__module__.partition(".")[0])
        reader = _forms.get(qualified_name(kind))
        if reader is None:
            continue
        form = reader(layer)
        if not isinstance(form, Form):
            raise PortError(
                f"the form registered for {qualified_name(kind)} is no Form. Received: {describe_value(form)}."
            )
        return form
    return None


def qualified_name(kind: type) -> str:
    """Return the name under which a class is registered.

    >>> qualified_name(Form)
    'polyamp.porting.layouts.layer_layout.Form'
    """
    return f"{kind.__module__}.{kind.__qualname__}"


@functools.cache
def _entry_points() -> Mapping[str, Any]:
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}


@functools.cache
def _load_entry_points(root: str) -> None:
    entry = _entry_points().get(root)
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

"""The equinox model that `loss_fn` gets: a real module, for equinox's own functions too, whose calls run under the
policy (S29).

A bound module has a subclass of its own class, with a static field that says where it stands in the model. What
`eqx.tree_at`, `eqx.combine`, `eqx.nn.inference_mode` or `jax.tree.map` make of it is bound to the same place: a call of
such a copy runs the model with the copy there.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

import equinox as eqx
import jax

from polyamp_jax.models import attributes
from polyamp_jax.models.call_hook import NATIVE, native_class
from polyamp_jax.models.routes import ROOT, Route, Step, kind_of

_PLACE = "_polyamp_place"


class Owner(Protocol):
    """What runs the calls of a bound model, and knows its parameters: the engine."""

    root: Any

    def call(self, route: Route, args: Any, kwargs: Any, part: Any = None) -> Any:
        """The output of the part that `route` leads to; with a copy, `part`, in its module's place."""

    def narrowed(self, route: Route, value: Any) -> Any:
        """A value that holds parameters, as the model computes with it."""

    def params_of(self, part: Any, route: Route) -> Any:
        """The masters of a part."""

    def state(self) -> Any:
        """The model's state, as the calls so far have left it; None if it has none."""


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """Where a bound module stands; equal to itself alone."""

    owner: Callable[[], Owner | None]
    route: Route


def bind(model: Any, owner: Callable[[], Owner | None]) -> Any:
    """A copy of a native module whose modules are bound."""

    def bound(node: Any, route: Route) -> Any:
        kind: Any = type(node)
        return _made(node, _bound(kind), route, bound, Place(owner, route))

    return bound(model, ROOT)


def native(model: Any) -> Any:
    """A bound module as one of the user's own classes."""

    def plain(node: Any, route: Route) -> Any:
        return _made(node, native_class(type(node)), route, plain, None)

    return plain(model, ROOT)


def is_bound(value: Any) -> bool:
    """Whether a value is a bound equinox module, or a copy of one."""
    return isinstance(value, eqx.Module) and NATIVE in vars(type(value)) and _PLACE in vars(value)


def place_of(module: Any) -> Place:
    """Where a bound module stands."""
    place: Place = vars(module)[_PLACE]
    return place


def is_copy(module: Any) -> bool:
    """Whether a bound module was made of the one that stands in the model, and is not that itself."""
    place = place_of(module)
    owner = place.owner()
    return owner is None or place.route.walked(owner.root) is not module


def _made(node: Any, kind: Any, route: Route, change: Callable[[Any, Route], Any], place: Place | None) -> Any:
    """A module of another class with the same fields, the modules in them changed."""
    made = object.__new__(kind)
    for name, value in vars(node).items():
        if name != _PLACE:
            object.__setattr__(made, name, _changed(value, route.to(Step(name, True), "module"), change))
    if place is not None:
        object.__setattr__(made, _PLACE, place)
    return made


def _changed(value: Any, route: Route, change: Callable[[Any, Route], Any]) -> Any:
    """A value of a field with the modules in it changed."""
    if isinstance(value, eqx.nn.StateIndex):
        return value
    if isinstance(value, eqx.Module):
        return value if hasattr(value, "__func__") else change(value, route)
    children, structure = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda item: item is not value)
    if jax.tree_util.treedef_is_leaf(structure):
        return value
    made = [_changed(child, route.to(_step(keys[0]), "module"), change) for keys, child in children]
    return (
        value if all(a is b for a, (_, b) in zip(made, children, strict=True)) else jax.tree.unflatten(structure, made)
    )


def _step(key: Any) -> Step:
    if isinstance(key, jax.tree_util.GetAttrKey):
        return Step(key.name, True)
    return Step(key.idx if isinstance(key, jax.tree_util.SequenceKey) else key.key, False)


@functools.lru_cache(maxsize=4096)
def _bound(kind: Any) -> type:
    """The bound subclass of a class; JAX keeps every class that is a pytree for ever, hence one per class."""
    own = native_class(kind)

    def get(self: Any, name: str) -> Any:
        if name.startswith("__") or name in (_PLACE, NATIVE):
            return own.__getattribute__(self, name)
        return _read(own, self, name)

    def missing(self: Any, name: str) -> Any:
        return _missing(own, self, name)

    names: dict[str, Any] = {
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__annotations__": {_PLACE: Any},
        "__getattribute__": get,
        "__getattr__": missing,
        _PLACE: eqx.field(static=True, default=None, repr=False),
        NATIVE: own,
    }
    if any("__call__" in vars(base) for base in own.__mro__):
        names["__call__"] = _dispatched(own.__call__, None)
    made: type = type(own)(own.__name__, (own,), names)
    return made


def _dispatched(function: Callable[..., Any], step: Step | None) -> Callable[..., Any]:
    """A method of a bound module: the engine runs it on a copy of the model, under the policy."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        route = place_of(self).route
        return _run(self, route if step is None else route.to(step, "method"), args, kwargs)

    return call


def _run(module: Any, route: Route, args: Any, kwargs: Any) -> Any:
    return _owner(module).call(route, args, kwargs, native(module) if is_copy(module) else None)


def _owner(module: Any) -> Owner:
    return place_of(module).owner() or attributes.Refusing()


def _read(own: Any, module: Any, name: str) -> Any:
    """An attribute of a bound module."""
    route, step = place_of(module).route, Step(name, True)
    definition = inspect.getattr_static(own, name, None)
    is_property = name not in vars(module) and isinstance(definition, property | functools.cached_property)
    value = getattr(native(module), name) if is_property else own.__getattribute__(module, name)
    kind = kind_of(module, step, value, eqx.Module)
    if kind == "method":
        return functools.partial(_dispatched(getattr(own, name), step), module)
    if kind == "property" and attributes.is_computed(value):
        return _run(module, route.to(step, kind), (), {})
    return _owner(module).narrowed(route, value) if kind in ("value", "property") else value


def _missing(own: Any, module: Any, name: str) -> Any:
    """What `__getattr__` gives: the user's own, or `params` and `state`."""
    users = getattr(own, "__getattr__", None)
    if users is not None:
        try:
            return users(module, name)
        except AttributeError:
            pass
    if name.startswith("__") or _PLACE not in vars(module):
        raise AttributeError(name)
    place = place_of(module)
    if name == "params":
        if is_copy(module):
            return eqx.filter(native(module), eqx.is_inexact_array)
        return _owner(module).params_of(native(module), place.route)
    if name == "state" and place.route == ROOT and (state := _owner(module).state()) is not None:
        return state
    raise AttributeError(attributes.missing(module, place.route, name))

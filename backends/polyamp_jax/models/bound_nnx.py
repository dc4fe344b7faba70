"""The nnx model that `loss_fn` gets: a real module, for flax's own functions too, whose calls run under the policy
(S29).

A bound module has a subclass of its own class. `__call__`, methods and properties that the user's class defines go
through the engine, by the module's route; `__getattribute__` gives everything else as it is. In a step the modules of
the pass's own view change their classes (`bind`); of the user's own model, outside of a step, a bound module shares the
attributes (`share`). A copy that `nnx.merge` or a transformation makes is bound to nothing, and refuses to be called.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from flax import nnx

from polyamp_jax import compat
from polyamp_jax.models import attributes
from polyamp_jax.models.call_hook import NATIVE, native_class
from polyamp_jax.models.compat import NNX_INTERNAL, nnx_class_options
from polyamp_jax.models.routes import ROOT, Route, Step, holds, kind_of

_HELPERS: Final = tuple(getattr(nnx, name) for name in ("List", "Dict") if hasattr(nnx, name))
"""Modules of flax's that hold others, and compute nothing."""
_READS: Final = ("iter_modules", "iter_children")
"""Methods of the base class that only read; until flax 0.11 they are no functions."""


class Owner(Protocol):
    """What runs the calls of a bound model, and knows its parameters: the engine."""

    def call(self, route: Route, args: Any, kwargs: Any) -> Any:
        """The output of the model, or of the part that `route` leads to."""

    def params_of(self, part: Any, route: Route) -> Any:
        """The masters of a part."""

    def computed(self, route: Route) -> Any:
        """What the model computes with, at a route: in mode "cast" a parameter's cast."""


class Place(NamedTuple):
    """Where a bound module stands.

    Attributes:
        alive: the module itself, if it still is.
        owner: its engine, or None if that is gone.
        route: from the root.
        native: of a module that shares the attributes of the user's own, that one; else None.
    """

    alive: weakref.ref[Any]
    owner: Callable[[], Owner | None]
    route: Route
    native: Any = None


_places: Final[dict[int, Place]] = {}
"""By the identity of the module: what flax copies must not carry it along."""


_NOWHERE: Final = Place(weakref.ref(attributes.Refusing), attributes.Refusing, ROOT)


def bind(model: Any, owner: Owner) -> Any:
    """The model itself, a view that belongs to one pass, with all of its modules bound."""
    found = weakref.ref(owner)
    for module, route in [(module, Route(_steps(model, keys))) for keys, module in compat.nnx_modules(model)]:
        kind: Any = type(module)
        object.__setattr__(module, "__class__", _bound(kind))
        _put(module, found, route)
    return model


def share(native: Any, owner: Owner, route: Route = ROOT) -> Any:
    """A bound module with the attributes of the user's own: what is written to either is written to both."""
    own: Any = type(native)
    module: Any = object.__new__(_bound(own))
    object.__setattr__(module, "__dict__", native.__dict__)
    _put(module, lambda: owner, route, native)
    return module


def is_bound(value: Any) -> bool:
    """Whether a value is a bound nnx module, or a copy of one."""
    return isinstance(value, nnx.Module) and NATIVE in vars(type(value)) and "_polyamp_bound" in vars(type(value))


def place_of(module: Any) -> Place:
    """Where a bound module stands; of a copy nowhere."""
    place = _places.get(id(module))
    return place if place is not None and place.alive() is module else _NOWHERE


@contextlib.contextmanager
def native(model: Any) -> Iterator[None]:
    """A block in which the modules of a bound model have the user's own classes."""
    bound = [(module, type(module)) for _, module in list(compat.nnx_modules(model)) if is_bound(module)]
    for module, kind in bound:
        object.__setattr__(module, "__class__", native_class(kind))
    try:
        yield
    finally:
        for module, kind in bound:
            object.__setattr__(module, "__class__", kind)


def _put(module: Any, owner: Callable[[], Owner | None], route: Route, native: Any = None) -> None:
    number = id(module)
    _places[number] = Place(weakref.ref(module, lambda _: _places.pop(number, None)), owner, route, native)


def _steps(root: Any, keys: Sequence[Any]) -> tuple[Step, ...]:
    """The steps of a path as flax has it: keys of containers, and names of attributes."""
    steps = []
    for key in keys:
        is_item = not isinstance(key, str) or isinstance(root, Mapping)
        steps.append(Step(key, not is_item))
        root = root[key] if is_item else vars(root)[key] if key in vars(root) else getattr(root, key)
    return tuple(steps)


@functools.lru_cache(maxsize=4096)
def _bound(kind: Any) -> type:
    """The bound subclass of a class; JAX keeps every class that is a pytree for ever, hence one per class."""
    own = native_class(kind)

    def get(self: Any, name: str) -> Any:
        return own.__getattribute__(self, name) if name.startswith(NNX_INTERNAL) else _read(own, self, name)

    def missing(self: Any, name: str) -> Any:
        return _missing(own, self, name)

    def put(self: Any, name: str, value: Any) -> None:
        if not (name.startswith(NNX_INTERNAL) or isinstance(value, nnx.Variable)):
            attributes.refuse_set(place_of(self).route, name)
        own.__setattr__(self, name, value)

    def delete(self: Any, name: str) -> None:
        if not (name.startswith(NNX_INTERNAL) or isinstance(vars(self).get(name), nnx.Variable)):
            attributes.refuse_delete(place_of(self).route, name)
        own.__delattr__(self, name)

    names = {
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__getattribute__": get,
        "__getattr__": missing,
        "__setattr__": put,
        "__delattr__": delete,
        NATIVE: own,
        "_polyamp_bound": True,
    }
    if any("__call__" in vars(base) for base in own.__mro__):
        names["__call__"] = _dispatched(own.__call__, None)
    made: type = type(own)(own.__name__, (own,), names, **nnx_class_options(own))
    return made


def _dispatched(function: Callable[..., Any], step: Step | None) -> Callable[..., Any]:
    """A method of a bound module: the engine runs it on a copy of the model, under the policy."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        place = place_of(self)
        route = place.route if step is None else place.route.to(step, "method")
        return _owner(place).call(route, args, kwargs)

    return call


def _owner(place: Place) -> Owner:
    return place.owner() or attributes.Refusing()


def _read(own: Any, module: Any, name: str) -> Any:
    """An attribute of a bound module."""
    place = place_of(module)
    step = Step(name, True)
    is_property = name not in vars(module) and _is_property(own, name)
    if not is_property:
        value = own.__getattribute__(module, name)
    elif place.native is not None:
        value = getattr(place.native, name)
    else:
        with native(module):
            value = getattr(module, name)
    if name in _READS:
        return value
    if isinstance(module, _HELPERS) and not is_property and name not in vars(module):
        return value  # what a list or a dict of modules does with them
    kind = kind_of(module, step, value, nnx.Module)
    if kind == "method":
        return types.MethodType(_dispatched(getattr(own, name), step), module)
    route = place.route.to(step, kind)
    if kind == "base":
        attributes.refuse_base(module, place.route.to(step, kind))
    if kind == "property" and attributes.is_computed(value):
        return _owner(place).call(route, (), {})
    if kind in ("module", "container"):
        return value if place.native is None else _shared(value, _owner(place), place.route, step)
    if place is not _NOWHERE and _has_parameters(value):
        return _owner(place).computed(route)
    return value


def _is_property(own: Any, name: str) -> bool:
    """Whether a name of the class is one that Python computes when it is read, and no method."""
    definition = inspect.getattr_static(own, name, None)
    return hasattr(type(definition), "__get__") and not callable(definition) and not inspect.isroutine(definition)


def _has_parameters(value: Any) -> bool:
    if isinstance(value, nnx.Param):
        return True
    if isinstance(value, Mapping):
        return any(map(_has_parameters, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_parameters, value))


def _shared(value: Any, owner: Owner, outer: Route, step: Step) -> Any:
    """A module of the user's own model as a bound one, in the containers that it is in."""
    if isinstance(value, nnx.Module):
        return value if is_bound(value) else share(value, owner, outer.to(step, "module"))
    route = outer.to(step, "container")
    if isinstance(value, Mapping):
        return {key: _shared(item, owner, route, Step(key, False)) for key, item in value.items()}
    if isinstance(value, list | tuple) and holds(value, nnx.Module):
        items = [_shared(item, owner, route, Step(number, False)) for number, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _missing(own: Any, module: Any, name: str) -> Any:
    """What `__getattr__` gives: the user's own, or `params`."""
    if (users := getattr(own, "__getattr__", None)) is not None:
        with contextlib.suppress(AttributeError):
            return users(module, name)
    if name.startswith(NNX_INTERNAL):
        raise AttributeError(name)
    place = place_of(module)
    if name == "params":
        return _owner(place).params_of(module, place.route)
    raise AttributeError(attributes.missing(module, place.route, name))

"""Proxies of nnx and equinox modules: the model that `loss_fn` receives, whose calls the engine runs (S29).

A proxy is a real module of its library, so the library's own functions accept it. Its class is a subclass of the
user's class, whose calls, methods and computing properties run through the engine, by the module's path.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final, Protocol

from polyamp_jax.models.attribute_access import UnboundEngine
from polyamp_jax.models.call_hook import NATIVE_CLASS_ATTRIBUTE, native_class
from polyamp_jax.models.module_path import ROOT_PATH, ModulePath, PathStep

_LOOKUP_ATTRIBUTE: Final = "_polyamp_binding_of"
"""Attribute of a proxy class: a function from a module to its `Binding`."""


class ModuleEngine(Protocol):
    """Engine interface of a bound model: runs its calls and returns its parameters."""

    root: Any

    def call(self, route: ModulePath, args: Any, kwargs: Any, part: Any = None) -> Any:
        """Return the output of the model, or of the part at `route`. A copy, `part`, replaces the module there."""

    def params_of(self, part: Any, route: ModulePath) -> Any:
        """Return the master parameters of a part."""

    def computed(self, route: ModulePath, value: Any) -> Any:
        """Return the value at `route` with the parameters that the model computes with. In mode "cast" these are the
        cast parameters."""

    def state(self) -> Any:
        """Return the model's state after the calls so far, or None if it has none."""


@dataclasses.dataclass(frozen=True, eq=False)
class Binding:
    """Engine and path of a proxy. Compares by identity.

    Attributes:
        find_engine: returns the module's engine, or None if the engine no longer exists.
        route: path from the root.
        native: the user's own module, if the proxy shares its attributes (nnx); else None.
        module_ref: weak reference to the module itself (nnx), or None.
    """

    find_engine: Callable[[], ModuleEngine | None]
    route: ModulePath
    native: Any = None
    module_ref: Any = None

    @property
    def engine(self) -> ModuleEngine:
        """The module's engine; one whose every call raises if the module is not bound to a model any more."""
        return self.find_engine() or UnboundEngine()


NO_BINDING: Final = Binding(UnboundEngine, ROOT_PATH)
"""Binding of a copy that flax made."""

RunMethod = Callable[[Any, ModulePath, Any, Any], Any]
"""`run(module, route, args, kwargs)`: runs the part of a proxy at `route` through its engine."""


def binding_of(module: Any) -> Binding | None:
    """Return the binding of a proxy of an nnx or equinox module, or of a copy of one; None for anything else."""
    lookup = vars(type(module)).get(_LOOKUP_ATTRIBUTE)
    found: Binding | None = None if lookup is None else lookup(module)
    return found


def is_proxy(value: Any) -> bool:
    """Return whether a value is a proxy of an nnx or equinox module, or a copy of one."""
    return binding_of(value) is not None


def proxy_class_attributes(own: Any, lookup: Callable[[Any], Binding | None], run: RunMethod) -> dict[str, Any]:
    """Return what the proxy classes of both libraries define, for the user's class `own`."""
    names: dict[str, Any] = {
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        NATIVE_CLASS_ATTRIBUTE: native_class(own),
        _LOOKUP_ATTRIBUTE: staticmethod(lookup),
    }
    if any("__call__" in vars(base) for base in own.__mro__):
        names["__call__"] = dispatch_method(own.__call__, None, lookup, run)
    return names


def dispatch_method(
    function: Callable[..., Any], step: PathStep | None, lookup: Callable[[Any], Any], run: RunMethod
) -> Callable[..., Any]:
    """Return a proxy's method, which the engine runs under the policy on a copy of the model.

    Args:
        function: the method of the user's class.
        step: the step from the module to the method; None for `__call__`.
        lookup: returns the module's binding.
        run: see `RunMethod`.
    """

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        route = lookup(self).route
        return run(self, route if step is None else route.to(step, "method"), args, kwargs)

    return call

"""Proxies of nnx and equinox modules: the model that `loss_fn` receives, whose calls the engine runs (S29).

A proxy is a real module of its library, so the library's own functions accept it. Its class is a subclass of the
user's class, whose calls, methods and computing properties run through the engine, by the module's path. An attribute
that cannot be read or written in `loss_fn` raises an error that says what to do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import jax

from polyamp.errors import RecipeError, TraceError, UnsupportedError
from polyamp_jax import compat
from polyamp_jax.arrays import is_array
from polyamp_jax.models.call_hook import NATIVE_CLASS_ATTRIBUTE, native_class
from polyamp_jax.models.module_path import ROOT_PATH, ModulePath, PathStep

_LOOKUP_ATTRIBUTE: Final = "_polyamp_binding_of"
"""Attribute of a proxy class: a function from a module to its `Binding`."""

NO_ATTRIBUTE: Final = object()
"""Object that attributes of a plain function are read from: it has none."""

TRANSFORMED_LOSS_ERROR: Final = (
    "loss_fn must be the loss function itself: its model is no array, so jax.jit, jax.grad and jax.value_and_grad "
    "cannot take it. polyamp differentiates and compiles loss_fn: pass it without it, and call no transformation of "
    "JAX on a function of the model inside of it, nor a copy that nnx.merge, nnx.clone or jax.tree.map makes of it. (A "
    "transformed function may close over the model instead, if that has neither running statistics nor random "
    "streams.)"
)
"""Error message for a bound model that is passed to a JAX transformation, or whose copy is called."""


class UnboundEngine:
    """Engine of a copy that belongs to no model, made by `jax.tree.map` or a transformation. Every call raises.

    Attributes:
        params: the parameters of the copy, if it is no module of its library.
    """

    root: Any = None

    def __init__(self, params: Any = None) -> None:
        self.params = params

    def call(self, *_: Any) -> Any:
        """Raise `RecipeError`: the call could not pass on the running state and the random streams."""
        raise RecipeError(TRANSFORMED_LOSS_ERROR)

    with_compute_dtype = params_of = resolve_policy = state = view = call


def has_computed_arrays(value: Any) -> bool:
    """Return whether a property computed new arrays. These are computed again under the policy."""
    leaves = jax.tree.leaves(value)
    return not isinstance(value, compat.nnx_classes()) and bool(leaves) and all(map(is_array, leaves))


def refuse_base_method(owner: Any, route: ModulePath) -> None:
    """Reject a method of the library's base class. Raises `UnsupportedError`."""
    raise UnsupportedError(
        f"{route} is a method of {type(owner).__name__}'s base class, for use inside of a module: called from "
        "loss_fn it would pass the policy by, or what it changes would be lost. Call a method that the module "
        "defines; what belongs before training (train(), eval()) comes before polyamp.init. Parameters: "
        "model.params, or polyamp.parameters(model)."
    )


def refuse_set_attribute(route: ModulePath, name: str) -> None:
    """Reject `model.name = value`. Raises `TraceError`."""
    raise TraceError(
        f"{route}.{name} = ... would be lost: in JAX the model in loss_fn is a view of the state, "
        "which is a value. Return what is to be kept as aux, keep it in an nnx.Variable or a mutable collection of "
        "the model, or set the attribute before polyamp.init."
    )


def refuse_delete_attribute(route: ModulePath, name: str) -> None:
    """Reject `del model.name`. Raises `TraceError`."""
    raise TraceError(f"del {route}.{name} would be lost: delete the attribute before polyamp.init.")


def missing_attribute_message(owner: Any, route: ModulePath, name: str) -> str:
    """Return the error message for an attribute that does not exist."""
    if owner is NO_ATTRIBUTE:
        return (
            f"{route}.{name}: a model that is one function has the attribute params, and no other. Pass "
            "(linen_module, variables), an nnx or equinox module, or what hk.multi_transform made."
        )
    names = [other for other in dir(owner) if not other.startswith("_")]
    near = difflib.get_close_matches(name, names, 3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    if compat.is_a(owner, "flax.linen", "Module"):
        hint += (
            " What linen makes in a @nn.compact method is no attribute: define it in setup(), or read "
            "model.params[...], which is nested by module names."
        )
    return f"{route}: {type(owner).__name__!r} has no attribute {name!r}.{hint}"


class ModuleEngine(Protocol):
    """Engine interface of a bound model: runs its calls and returns its parameters."""

    root: Any

    def call(self, route: ModulePath, args: Any, kwargs: Any, part: Any = None) -> Any:
        """Return the output of the model, or of the part at `route`. A copy, `part`, replaces the module there."""

    def params_of(self, part: Any, route: ModulePath) -> Any:
        """Return the master parameters of a part."""

    def with_compute_dtype(self, route: ModulePath, value: Any) -> Any:
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


@contextlib.contextmanager
def native_classes(model: Any) -> Iterator[None]:
    """Give the modules of a bound model the user's own classes inside the context."""
    bound = [(module, type(module)) for _, module in list(compat.walk_nnx_modules(model)) if is_proxy(module)]
    for module, kind in bound:
        object.__setattr__(module, "__class__", native_class(kind))
    try:
        yield
    finally:
        for module, kind in bound:
            object.__setattr__(module, "__class__", kind)

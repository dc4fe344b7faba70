"""`Route`: how `loss_fn` came from a model to a part of it, as steps that any copy of the model can be walked by.

`model.encoder.layers[0]` is the route of two attributes and an item. What `loss_fn` holds is such a route, not the
part itself: the part runs inside a trace of its own, on a copy of the model that lives there. Called by the adapters
and by `precision.reading`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple

from polyamp_jax.arrays import cast_arguments
from polyamp_jax.models.scopes import Casts

Kind = Literal["module", "method", "property", "container", "base", "value"]
"""What stands at the end of a route.

A module, a method and a property of the user's run under the policy; a container holds modules; "base" is a method that
the library's base class has, for use inside a module; all else is a value as it is."""

READS: Final = frozenset(("get_variable", "has_variable", "is_initializing", "variables", "path", "name", "scope"))
"""Names of linen's base class that only read, and so may be used on the model itself."""


class Step(NamedTuple):
    """One step: an attribute by its name, or an item by its key."""

    key: Any
    attribute: bool


class Route(NamedTuple):
    """Steps from the root of a model to a part of it.

    Attributes:
        steps: in order; none for the model itself.
        kind: what is there: a method and a property belong to the module that the steps before the last lead to.
    """

    steps: tuple[Step, ...] = ()
    kind: Kind = "module"

    def to(self, step: Step, kind: Kind) -> Route:
        """One step further."""
        return Route((*self.steps, step), kind)

    def walked(self, root: Any) -> Any:
        """What stands at the end, starting from this copy of the model."""
        for key, attribute in self.steps:
            root = getattr(root, key) if attribute else root[key]
        return root

    def function(self, root: Any) -> Callable[..., Any]:
        """What is called: the module or the method, or, of a property, a function without arguments that reads it."""
        if self.kind == "property":
            return functools.partial(self.walked, root)
        called: Callable[..., Any] = self.walked(root)
        return called

    @property
    def path(self) -> str:
        """The path of the module that runs, as polyamp names it: of a method that of its owner."""
        steps = self.steps[:-1] if self.kind in ("method", "property") else self.steps
        return "/".join(str(step.key) for step in steps)

    @property
    def is_method(self) -> bool:
        """Whether it runs code of a module beside its `__call__`, around which no library's hook stands."""
        return self.kind in ("method", "property")

    def __str__(self) -> str:
        shown = (f".{step.key}" if step.attribute else f"[{step.key!r}]" for step in self.steps)
        return "".join(("model", *shown))


ROOT: Final = Route()


def kind_of(owner: Any, step: Step, value: Any, module: type | tuple[type, ...]) -> Kind:
    """What stands at the end of a step from `owner`.

    Args:
        owner: where the step begins.
        step: the step.
        value: what it led to.
        module: the library's class of modules.
    """
    if isinstance(value, module) and not hasattr(value, "__func__"):  # equinox's bound methods are modules too
        return "module"
    if holds(value, module):
        return "container"
    if not step.attribute or step.key in getattr(owner, "__dict__", {}):
        return "value"
    definition = inspect.getattr_static(type(owner), step.key, None)
    if isinstance(definition, staticmethod | type) or definition is None:
        return "value"
    is_property = not callable(value) and hasattr(type(definition), "__get__")  # flax wraps them in classes of its own
    if not is_property and not callable(value):
        return "value"
    if any(step.key in vars(base) for base in _bases(type(owner), module)):
        return "value" if step.key in READS else "base"
    return "property" if is_property else "method"


def holds(value: Any, module: type | tuple[type, ...]) -> bool:
    """Whether a list, tuple or mapping has modules in it."""
    if isinstance(value, Mapping):
        return any(isinstance(item, module) or holds(item, module) for item in value.values())
    if isinstance(value, list | tuple):
        return any(isinstance(item, module) or holds(item, module) for item in value)
    return False


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether a function takes an argument of this name, in any way."""
    parameters = inspect.signature(function).parameters.values()
    return any(p.name == name or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def given(function: Callable[..., Any], name: str, args: Any, kwargs: Any) -> bool:
    """Whether the caller gives the argument of this name, by position too."""
    return name in kwargs or name in inspect.signature(function).bind_partial(*args, **kwargs).arguments


def narrowed(route: Route, casts: Casts, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Cast mode: a method's arguments in the dtype of the module that it belongs to, as those of a call are."""
    dtype = casts.dtypes.get(route.path) if route.is_method and not casts.scoped else None
    if dtype is None:
        return args, kwargs
    made: tuple[Any, Any] = cast_arguments((args, kwargs), dtype, float64=casts.plan.float64)
    return made


def _bases(kind: type, module: type | tuple[type, ...]) -> list[type]:
    """The library's base class of modules and what it is made of, among the bases of a class."""
    roots = module if isinstance(module, tuple) else (module,)
    return [base for base in kind.__mro__ if base is not object and any(issubclass(root, base) for root in roots)]

"""Paths from a model to its submodules, methods and values, which can be resolved on any copy of the model.

`model.encoder.layers[0]` is a path of two attributes and an item. `loss_fn` works with such paths, not with the parts
themselves: a part runs inside a separate trace, on a copy of the model that lives there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple

PathKind = Literal["module", "method", "property", "container", "base", "value"]
"""Kind of the object at the end of a path.

- "module", "method", "property": defined by the user; they run under the policy.
- "container": contains modules.
- "base": a method of the library's base class, for use inside a module.
- "value": anything else, returned unchanged."""

READ_METHODS: Final = frozenset(
    ("get_variable", "has_variable", "is_initializing", "variables", "path", "name", "scope")
)
"""Read-only attributes of linen's base class, which are allowed on the model itself."""


class PathStep(NamedTuple):
    """Single step of a path: an attribute by its name, or an item by its key."""

    key: Any
    attribute: bool


class ModulePath(NamedTuple):
    """Steps from the root of a model to a part of it.

    Attributes:
        steps: the steps in order; empty for the model itself.
        kind: kind of the object there. A method or property belongs to the module at all steps but the last.
    """

    steps: tuple[PathStep, ...] = ()
    kind: PathKind = "module"

    def to(self, step: PathStep, kind: PathKind) -> ModulePath:
        """Return the path extended by one step."""
        return ModulePath((*self.steps, step), kind)

    def resolve(self, root: Any) -> Any:
        """Return the object at this path in `root`, a copy of the model."""
        for key, attribute in self.steps:
            root = getattr(root, key) if attribute else root[key]
        return root

    def function(self, root: Any) -> Callable[..., Any]:
        """Return the callable at this path. For a property it is a function without arguments that reads it."""
        if self.kind == "property":
            return functools.partial(self.resolve, root)
        called: Callable[..., Any] = self.resolve(root)
        return called

    @property
    def path(self) -> str:
        """polyamp's path string of the module that runs. For a method, the path of its owner."""
        steps = self.steps[:-1] if self.kind in ("method", "property") else self.steps
        return "/".join(str(step.key) for step in steps)

    @property
    def is_method(self) -> bool:
        """Whether this is a method or property, which the library's hooks around `__call__` do not cover."""
        return self.kind in ("method", "property")

    def __str__(self) -> str:
        shown = (f".{step.key}" if step.attribute else f"[{step.key!r}]" for step in self.steps)
        return "".join(("model", *shown))


ROOT_PATH: Final = ModulePath()


def path_kind(owner: Any, step: PathStep, value: Any, module: type | tuple[type, ...]) -> PathKind:
    """Return the kind of the object that one step from `owner` leads to.

    Args:
        owner: the object that the step starts from.
        step: the step.
        value: the object that it leads to.
        module: the library's module class or classes.
    """
    if isinstance(value, module) and not hasattr(value, "__func__"):  # equinox's bound methods are modules too
        return "module"
    if has_instances(value, module):
        return "container"
    if not step.attribute or step.key in getattr(owner, "__dict__", {}):
        return "value"
    definition = inspect.getattr_static(type(owner), step.key, None)
    if isinstance(definition, staticmethod | type) or definition is None:
        return "value"
    # flax wraps properties in its own descriptors
    is_property = not callable(value) and hasattr(type(definition), "__get__")
    if not is_property and not callable(value):
        return "value"
    if any(step.key in vars(base) for base in _base_classes(type(owner), module)):
        return "value" if step.key in READ_METHODS else "base"
    return "property" if is_property else "method"


def has_instances(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Return whether a list, tuple or mapping contains instances of these classes."""
    if isinstance(value, Mapping):
        return has_instances(list(value.values()), kinds)
    if isinstance(value, list | tuple):
        return any(isinstance(item, kinds) or has_instances(item, kinds) for item in value)
    return False


def has_argument(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function accepts an argument of this name, including through `**kwargs`."""
    parameters = inspect.signature(function).parameters.values()
    return any(p.name == name or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def is_argument_given(function: Callable[..., Any], name: str, args: Any, kwargs: Any) -> bool:
    """Return whether the caller passes the argument of this name, by keyword or by position."""
    return name in kwargs or name in inspect.signature(function).bind_partial(*args, **kwargs).arguments


def _base_classes(kind: type, module: type | tuple[type, ...]) -> list[type]:
    """Return the bases of a class that are the library's module class or one of its bases."""
    roots = module if isinstance(module, tuple) else (module,)
    return [base for base in kind.__mro__ if base is not object and any(issubclass(root, base) for root in roots)]

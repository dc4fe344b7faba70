"""Which framework a plain function computes with, read off the function itself.

Arguments in NumPy do not say it: a function of `jax.numpy` or torch takes them too. Its closure, defaults, `self` and
the globals and imports that its code names do. Nothing is imported. Called by `registry.autocast` and
`registry.explain`.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

_DEEPEST: Final = 8
_WIDEST: Final = 200
_MOST: Final = 5000
"""How deep, how wide and how much is looked at: what a function holds may be a data set."""
_NAMED: Final = ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME")
_NEUTRAL: Final = ("numpy", "polyamp", "builtins")
"""Roots that say nothing: NumPy's arrays go everywhere, and polyamp, beside `polyamp.reference`, serves all."""


def frameworks(target: Callable[..., Any], roots: Collection[str]) -> list[str]:
    """The root modules among `roots` that a function, method or callable object has to do with, in order of discovery.

    Args:
        target: what will be called.
        roots: root modules of registered frameworks.

    Example:
        >>> import jax.numpy as jnp
        >>> frameworks(lambda x: jnp.exp(x), ["torch", "jax"])
        ['jax']
    """
    return list(dict.fromkeys(_roots(target, frozenset(roots), 0, set())))


def says_something(module: str | None) -> bool:
    """Whether an object from this module tells which framework it is for."""
    return _root(module) is not None


def _root(module: str | None) -> str | None:
    name = module or ""
    root = name.partition(".")[0]
    if name.startswith("polyamp.reference"):
        return "reference"
    return None if not root or root in _NEUTRAL or root == "reference" else root  # the user's own of that name


def _roots(value: Any, known: frozenset[str], depth: int, seen: set[int]) -> Iterator[str]:
    """Root modules of an object or, where it is of no framework itself, of what it holds."""
    if depth > _DEEPEST or len(seen) > _MOST or id(value) in seen:
        return
    seen.add(id(value))
    own = [root for root in map(_root, _modules(value)) if root in known]
    yield from own
    if not own and not isinstance(value, types.ModuleType | type):
        for item in itertools.islice(_held(value), _WIDEST):
            yield from _roots(item, known, depth + 1, seen)


def _modules(value: Any) -> list[str | None]:
    """The names of the modules that an object is, or is made, of."""
    if isinstance(value, types.ModuleType):
        return [value.__name__]
    if isinstance(value, type):
        return [value.__module__]
    return [*(kind.__module__ for kind in type(value).__mro__), getattr(value, "__module__", None)]


def _held(value: Any) -> Iterator[Any]:
    """What an object refers to, as far as it matters when it is called."""
    if isinstance(value, types.FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell))
        yield from (value.__defaults__ or (), value.__kwdefaults__ or {})
        yield from _named(value.__code__, value.__globals__)
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.BuiltinFunctionType):
        yield value.__self__  # torch.matmul is a method of one of torch's objects
    elif isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    else:
        yield from vars(value).values() if hasattr(value, "__dict__") else ()
        calls = [kind.__dict__["__call__"] for kind in type(value).__mro__ if "__call__" in kind.__dict__]
        yield from (call for call in calls[:1] if isinstance(call, types.FunctionType))


def _named(code: types.CodeType, scope: Mapping[str, Any]) -> Iterator[Any]:
    """The globals that code names, and an empty module for each of its imports; functions inside it included."""
    import dis

    for instruction in dis.get_instructions(code):
        if instruction.opname in _NAMED:
            if instruction.opname == "IMPORT_NAME":
                yield types.ModuleType(str(instruction.argval))
            elif instruction.argval in scope:
                yield scope[instruction.argval]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _named(constant, scope)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # reading is the question
    except ValueError:
        return False
    return True

"""Detection of the framework that a plain function computes with, from the function itself.

NumPy arguments do not determine it: functions of `jax.numpy` and torch accept them too. The detection reads the
closure, the defaults, `self`, and the globals and imports that the code names. It imports nothing.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

_MAX_DEPTH: Final = 8
_MAX_WIDTH: Final = 200
_MAX_OBJECTS: Final = 5000
"""Limits of depth, width and object count of the search, because a function may refer to a data set."""
_NAME_OPCODES: Final = ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME")
_NEUTRAL_ROOTS: Final = ("numpy", "polyamp", "builtins")
"""Neutral roots: NumPy's arrays are accepted everywhere, and polyamp, except `polyamp.reference`, serves all."""


def detect_frameworks(target: Callable[..., Any], roots: Collection[str]) -> list[str]:
    """Return the root modules among `roots` that a function, method or callable object uses, in order of discovery.

    Args:
        target: the callable.
        roots: root modules of registered frameworks.

    Example:
        >>> import jax.numpy as jnp
        >>> detect_frameworks(lambda x: jnp.exp(x), ["torch", "jax"])
        ['jax']
    """
    return list(dict.fromkeys(_framework_roots(target, frozenset(roots), 0, set())))


def has_framework(module: str | None) -> bool:
    """Whether the module of an object determines its framework."""
    return _framework_root(module) is not None


def _framework_root(module: str | None) -> str | None:
    name = module or ""
    root = name.partition(".")[0]
    if name.startswith("polyamp.reference"):
        return "reference"
    return None if not root or root in _NEUTRAL_ROOTS or root == "reference" else root  # a user's module called so


def _framework_roots(value: Any, known: frozenset[str], depth: int, seen: set[int]) -> Iterator[str]:
    """Iterate over the root modules of an object or, if it belongs to no framework, of the objects it refers to."""
    if depth > _MAX_DEPTH or len(seen) > _MAX_OBJECTS or id(value) in seen:
        return
    seen.add(id(value))
    own = [root for root in map(_framework_root, _module_names(value)) if root in known]
    yield from own
    if not own and not isinstance(value, types.ModuleType | type):
        for item in itertools.islice(_referenced_objects(value), _MAX_WIDTH):
            yield from _framework_roots(item, known, depth + 1, seen)


def _module_names(value: Any) -> list[str | None]:
    """Return the module names of an object: its own if it is a module, else its class's with those of the bases."""
    if isinstance(value, types.ModuleType):
        return [value.__name__]
    if isinstance(value, type):
        return [value.__module__]
    return [*(kind.__module__ for kind in type(value).__mro__), getattr(value, "__module__", None)]


def _referenced_objects(value: Any) -> Iterator[Any]:
    """Iterate over the objects that an object refers to and that matter in a call."""
    if isinstance(value, types.FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell))
        yield from (value.__defaults__ or (), value.__kwdefaults__ or {})
        yield from _code_globals(value.__code__, value.__globals__)
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


def _code_globals(code: types.CodeType, scope: Mapping[str, Any]) -> Iterator[Any]:
    """Iterate over the globals that code names, nested functions included, and an empty module for each import."""
    import dis

    for instruction in dis.get_instructions(code):
        if instruction.opname in _NAME_OPCODES:
            if instruction.opname == "IMPORT_NAME":
                yield types.ModuleType(str(instruction.argval))
            elif instruction.argval in scope:
                yield scope[instruction.argval]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_globals(constant, scope)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # reading raises ValueError for an empty cell
    except ValueError:
        return False
    return True

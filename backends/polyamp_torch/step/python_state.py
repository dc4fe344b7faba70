"""Python state that a loss function and its model change as they run: counters, lists, entries of dicts, globals.

A pass that is tried before a step is compiled must not count as one. Kept are shallow copies of what can be reached
from the function: closures, defaults, globals that its code names, attributes of objects and modules, containers.
Tensors count by being there, not by their values. Called by `compile_trial`.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from polyamp_torch.compat import buffers_in, children_in, parameters_in

_PLAIN: Final = (int, float, complex, str, bytes, bool, type(None))
_FOREIGN: Final = ("torch", "numpy", "polyamp", "polyamp_torch", "builtins")
"""Packages whose objects hold no state of the user's."""
_MOST: Final = 20_000
"""Objects that are looked at."""
_EMPTY: Final = types.CellType()
_MISSING: Final = object()


class Held(NamedTuple):
    """One object with state.

    Attributes:
        owner: the object, or the dict of a module's globals.
        items: what it held, by key; the items of a list or deque by number, those of a set as keys.
    """

    owner: Any
    items: dict[Any, Any]


class PythonState:
    """What can be reached from some objects, as it is now."""

    def __init__(self, *roots: Any) -> None:
        self._held: list[Held] = []
        waiting, seen = deque(roots), set[int]()
        while waiting and len(seen) < _MOST:
            value = waiting.popleft()
            if id(value) in seen or isinstance(value, (*_PLAIN, torch.Tensor, type, types.ModuleType)):
                continue
            seen.add(id(value))
            names: tuple[str, ...] = ()
            if isinstance(value, types.FunctionType):
                names = tuple(_names(value.__code__))
                waiting.extend((*(value.__closure__ or ()), *(value.__defaults__ or ())))
            elif isinstance(value, types.MethodType):
                waiting.extend((value.__self__, value.__func__))
            elif isinstance(value, functools.partial):
                waiting.extend((value.func, value.args, value.keywords))
            if isinstance(value, nn.Module):
                waiting.extend(children_in(value).values())
            found = _items(value, names)
            if found is not None:
                self._held.append(found)
                waiting.extend(found.items.values())

    def changed(self) -> dict[tuple[int, Any], Held]:
        """What is otherwise now: (identity of the owner, key) -> what the owner held. A list, deque or set is one item,
        with the key None."""
        found: dict[tuple[int, Any], Held] = {}
        for held in self._held:
            now = _now(held)
            keys = [
                key
                for key in {**held.items, **now}
                if not _alike(held.items.get(key, _MISSING), now.get(key, _MISSING))
            ]
            if keys and isinstance(held.owner, (list, deque, set)):
                keys = [None]  # one item
            owner = held.owner.known if isinstance(held.owner, Globals) else held.owner
            found.update({(id(owner), key): held for key in keys})
        return found


def put_back(held: Held, key: Any) -> None:
    """An item as it was; an attribute or entry that came since goes."""
    owner, items = held
    if isinstance(owner, types.CellType):
        owner.cell_contents = items["cell_contents"]
    elif isinstance(owner, list):
        owner[:] = items.values()
    elif isinstance(owner, (deque, set)):
        owner.clear()
        (owner.extend if isinstance(owner, deque) else owner.update)(items.values())
    else:
        target = owner.known if isinstance(owner, Globals) else owner if isinstance(owner, dict) else vars(owner)
        if key in items:
            target[key] = items[key]
        else:
            target.pop(key, None)


def _names(code: types.CodeType) -> Iterator[str]:
    """The global names in a function's code and in that of the functions inside it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _items(value: Any, names: tuple[str, ...]) -> Held | None:
    if isinstance(value, types.FunctionType):
        known = value.__globals__
        return Held(Globals(known, names), {name: known[name] for name in names if name in known})
    if isinstance(value, types.CellType):
        return None if value == _EMPTY else Held(value, {"cell_contents": value.cell_contents})
    if isinstance(value, (list, deque, tuple, set, dict, nn.Module)):
        return Held(value, _now(Held(value, {})))
    package = type(value).__module__.partition(".")[0]
    return None if package in _FOREIGN or not hasattr(value, "__dict__") else Held(value, dict(vars(value)))


class Globals(NamedTuple):
    """The globals that a function names.

    Attributes:
        known: those of its module.
        names: the names.
    """

    known: dict[str, Any]
    names: tuple[str, ...]


def _now(held: Held) -> dict[Any, Any]:
    owner = held.owner
    if isinstance(owner, Globals):
        return {name: owner.known[name] for name in owner.names if name in owner.known}
    if isinstance(owner, types.CellType):
        return {} if owner == _EMPTY else {"cell_contents": owner.cell_contents}
    if isinstance(owner, (list, deque, tuple)):
        return dict(enumerate(owner))
    if isinstance(owner, set):
        return {item: item for item in owner}
    if isinstance(owner, dict):
        return dict(owner)
    own = dict(vars(owner))
    if isinstance(owner, nn.Module):
        for slots in (parameters_in, buffers_in, children_in):
            inner = slots(owner)
            own = {name: value for name, value in own.items() if value is not inner}
    return own


def _alike(before: Any, after: Any) -> bool:
    if before is after or (isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)):
        return True
    if isinstance(before, _PLAIN) and type(before) is type(after):
        return bool(before == after) or before != before  # a NaN
    return False


def described(held: Held, key: Any, named: Callable[[Any], str | None]) -> str:
    """An item in words: `model.n`."""
    owner = held.owner
    if isinstance(owner, types.CellType):
        return "a variable of the function around loss_fn"
    if isinstance(owner, Globals):
        return f"the global {key!r}"
    if isinstance(owner, (list, deque, set, dict)):
        return f"a {type(owner).__name__}"
    return f"{named(owner) or type(owner).__name__}.{key}"

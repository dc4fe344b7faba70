"""Snapshot of the Python state that a loss function and its model change: counters, lists, dict entries, globals.

The trial pass before a compilation must not have side effects. The snapshot has shallow copies of the objects that can
be reached from the function: closures, defaults, globals that its code names, attributes of objects and modules, and
containers. Only the presence of tensors is compared, not their values.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from polyamp_torch.compat import module_buffers, module_children, module_parameters

_PLAIN_TYPES: Final = (int, float, complex, str, bytes, bool, type(None))
_FOREIGN_PACKAGES: Final = ("torch", "numpy", "polyamp", "polyamp_torch", "builtins")
"""Packages whose objects contain no user state."""
_MAX_OBJECTS: Final = 20_000
"""Maximum number of objects that are visited."""
_EMPTY_CELL: Final = types.CellType()
_MISSING: Final = object()


class ObjectState(NamedTuple):
    """Shallow copy of the state of one object.

    Attributes:
        owner: the object, or the dict of a module's globals.
        items: its contents by key; the items of a list or deque by index, those of a set as keys.
    """

    owner: Any
    items: dict[Any, Any]


class PythonState:
    """Snapshot of the state of all objects that can be reached from some roots."""

    def __init__(self, *roots: Any) -> None:
        self._held: list[ObjectState] = []
        waiting, seen = deque(roots), set[int]()
        while waiting and len(seen) < _MAX_OBJECTS:
            value = waiting.popleft()
            if id(value) in seen or isinstance(value, (*_PLAIN_TYPES, torch.Tensor, type, types.ModuleType)):
                continue
            seen.add(id(value))
            names: tuple[str, ...] = ()
            if isinstance(value, types.FunctionType):
                names = tuple(_global_names(value.__code__))
                waiting.extend((*(value.__closure__ or ()), *(value.__defaults__ or ())))
            elif isinstance(value, types.MethodType):
                waiting.extend((value.__self__, value.__func__))
            elif isinstance(value, functools.partial):
                waiting.extend((value.func, value.args, value.keywords))
            if isinstance(value, nn.Module):
                waiting.extend(module_children(value).values())
            found = _object_state(value, names)
            if found is not None:
                self._held.append(found)
                waiting.extend(found.items.values())

    def changed(self) -> dict[tuple[int, Any], ObjectState]:
        """Return what has changed since: (identity of the owner, key) -> the owner's old state.

        A list, deque or set is one item, with the key None."""
        found: dict[tuple[int, Any], ObjectState] = {}
        for held in self._held:
            now = _current_items(held)
            keys = [
                key
                for key in {**held.items, **now}
                if not _is_same_value(held.items.get(key, _MISSING), now.get(key, _MISSING))
            ]
            if keys and isinstance(held.owner, (list, deque, set)):
                keys = [None]  # one item
            owner = held.owner.known if isinstance(held.owner, FunctionGlobals) else held.owner
            found.update({(id(owner), key): held for key in keys})
        return found


def restore_item(held: ObjectState, key: Any) -> None:
    """Restore an item; remove an attribute or entry that was added since."""
    owner, items = held
    if isinstance(owner, types.CellType):
        owner.cell_contents = items["cell_contents"]
    elif isinstance(owner, list):
        owner[:] = items.values()
    elif isinstance(owner, (deque, set)):
        owner.clear()
        (owner.extend if isinstance(owner, deque) else owner.update)(items.values())
    else:
        target = (
            owner.known if isinstance(owner, FunctionGlobals) else owner if isinstance(owner, dict) else vars(owner)
        )
        if key in items:
            target[key] = items[key]
        else:
            target.pop(key, None)


def _global_names(code: types.CodeType) -> Iterator[str]:
    """Yield the global names in a function's code, nested functions included."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _global_names(inner)


def _object_state(value: Any, names: tuple[str, ...]) -> ObjectState | None:
    if isinstance(value, types.FunctionType):
        known = value.__globals__
        return ObjectState(FunctionGlobals(known, names), {name: known[name] for name in names if name in known})
    if isinstance(value, types.CellType):
        return None if value == _EMPTY_CELL else ObjectState(value, {"cell_contents": value.cell_contents})
    if isinstance(value, (list, deque, tuple, set, dict, nn.Module)):
        return ObjectState(value, _current_items(ObjectState(value, {})))
    package = type(value).__module__.partition(".")[0]
    return (
        None
        if package in _FOREIGN_PACKAGES or not hasattr(value, "__dict__")
        else ObjectState(value, dict(vars(value)))
    )


class FunctionGlobals(NamedTuple):
    """Globals that a function refers to.

    Attributes:
        known: the globals of its module.
        names: the names that it uses.
    """

    known: dict[str, Any]
    names: tuple[str, ...]


def _current_items(held: ObjectState) -> dict[Any, Any]:
    owner = held.owner
    if isinstance(owner, FunctionGlobals):
        return {name: owner.known[name] for name in owner.names if name in owner.known}
    if isinstance(owner, types.CellType):
        return {} if owner == _EMPTY_CELL else {"cell_contents": owner.cell_contents}
    if isinstance(owner, (list, deque, tuple)):
        return dict(enumerate(owner))
    if isinstance(owner, set):
        return {item: item for item in owner}
    if isinstance(owner, dict):
        return dict(owner)
    own = dict(vars(owner))
    if isinstance(owner, nn.Module):
        for slots in (module_parameters, module_buffers, module_children):
            inner = slots(owner)
            own = {name: value for name, value in own.items() if value is not inner}
    return own


def _is_same_value(before: Any, after: Any) -> bool:
    if before is after or (isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)):
        return True
    if isinstance(before, _PLAIN_TYPES) and type(before) is type(after):
        return bool(before == after) or before != before  # a NaN
    return False


def describe_item(held: ObjectState, key: Any, named: Callable[[Any], str | None]) -> str:
    """Return a description of an item, such as `model.n`."""
    owner = held.owner
    if isinstance(owner, types.CellType):
        return "a variable of the function around loss_fn"
    if isinstance(owner, FunctionGlobals):
        return f"the global {key!r}"
    if isinstance(owner, (list, deque, set, dict)):
        return f"a {type(owner).__name__}"
    return f"{named(owner) or type(owner).__name__}.{key}"

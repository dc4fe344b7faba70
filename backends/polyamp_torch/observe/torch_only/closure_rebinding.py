"""Rebinding of functions that close over parts of a model to the same parts of its copy.

`copy.deepcopy` treats a function as a constant. A function that a library adds to a model (a patched `forward`, a hook)
may reference the model's modules or tensors. In a copy it would still run, and train, the model itself.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def rebind_closures(twin: nn.Module, memo: Mapping[int, Any]) -> None:
    """Rebind the functions in the modules of a copy to the copy.

    Args:
        twin: the copy.
        memo: id of each part of the model -> its copy.
    """
    known: dict[int, Any] = {}
    for part in twin.modules():
        attributes = vars(part)
        hooks = [value for name, value in attributes.items() if "hooks" in name and isinstance(value, dict) and value]
        for where in (attributes, *hooks):
            for name, value in list(where.items()):
                if value is None or isinstance(value, bool | int | float | str | dict):
                    continue
                again = _rebind_value(value, memo, known)
                if again is not value:
                    where[name] = again


def _rebind_value(value: Any, memo: Mapping[int, Any], known: dict[int, Any]) -> Any:
    """Return the value rebound to the copy; itself if it references nothing of the model."""
    if isinstance(value, nn.Module | torch.Tensor):
        return memo.get(id(value), value)
    if isinstance(value, types.MethodType):
        owner = memo.get(id(value.__self__))
        return value if owner is None else types.MethodType(value.__func__, owner)
    if isinstance(value, functools.partial):
        return _rebind_partial(value, memo, known)
    if not isinstance(value, types.FunctionType):
        return value
    if id(value) not in known:
        known[id(value)] = value  # a function may reference itself
        known[id(value)] = _rebind_function(value, memo, known)
    return known[id(value)]


def _rebind_partial(value: functools.partial[Any], memo: Mapping[int, Any], known: dict[int, Any]) -> Any:
    parts = (value.func, *value.args, *value.keywords.values())
    made = [_rebind_value(part, memo, known) for part in parts]
    if all(one is other for one, other in zip(parts, made, strict=True)):
        return value
    count = len(value.args)
    return functools.partial(made[0], *made[1 : count + 1], **dict(zip(value.keywords, made[count + 1 :], strict=True)))


def _rebind_function(value: types.FunctionType, memo: Mapping[int, Any], known: dict[int, Any]) -> Any:
    cells = [_rebind_cell(cell, memo, known) for cell in value.__closure__ or ()]
    defaults = tuple(_rebind_value(each, memo, known) for each in value.__defaults__ or ())
    named = {name: _rebind_value(each, memo, known) for name, each in (value.__kwdefaults__ or {}).items()}
    same = all(one is other for one, other in zip(cells, value.__closure__ or (), strict=True))
    same = same and all(one is other for one, other in zip(defaults, value.__defaults__ or (), strict=True))
    if same and all(each is (value.__kwdefaults__ or {})[name] for name, each in named.items()):
        return value
    closure = tuple(cells) if value.__closure__ else None
    made = types.FunctionType(value.__code__, value.__globals__, value.__name__, defaults or None, closure)
    made.__kwdefaults__ = named or None
    vars(made).update(vars(value))
    made.__qualname__, made.__doc__, made.__module__ = value.__qualname__, value.__doc__, value.__module__
    return made


def _rebind_cell(cell: types.CellType, memo: Mapping[int, Any], known: dict[int, Any]) -> types.CellType:
    try:
        content = cell.cell_contents
    except ValueError:  # the cell is empty
        return cell
    again = _rebind_value(content, memo, known)
    return cell if again is content else types.CellType(again)

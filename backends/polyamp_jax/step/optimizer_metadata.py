"""Checkpoint metadata of an optax optimizer: the hyperparameters in the closures of its functions, by name.

optax stores no configuration: `optax.adam(1e-3)` is a pair of functions. Their closures contain the hyperparameters
under the names of optax's arguments. These are compared when a state is restored. Constants inside a user's function
cannot be detected.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Iterator
from typing import Any, Final

import jax
import numpy as np

from polyamp_jax.arrays import is_key
from polyamp_jax.models import library_compat

_MAX_DEPTH: Final = 40
_MAX_VALUES: Final = 2000


def optimizer_metadata(transformation: Any) -> dict[str, Any]:
    """Return function path and name -> value, for every number, string or flag in the transformation's closures."""
    functions = [getattr(transformation, role, None) for role in ("update", "init")]
    pairs = itertools.chain.from_iterable(_walk_closures(function, "", 0, frozenset()) for function in functions)
    found: dict[str, Any] = {}
    for path, value in itertools.islice(pairs, _MAX_VALUES):
        short = library_compat.optax_setting(path)
        if short is not None:
            found.setdefault(short, value)
    return found


def optimizer_setting(transformation: Any, name: str) -> str | None:
    """Return the setting whose current value is the exported array `name`, or None.

    `optax.inject_hyperparams` stores such values in the optimizer's state.
    """
    before, found, hyperparameter = name.rpartition("/hyperparams/")
    if not found or not f"{before}/".startswith("optimizer/"):
        return None
    wanted = library_compat.optax_hyperparameter(hyperparameter)
    return next((f"optimizer.{path}" for path in optimizer_metadata(transformation) if path.endswith(wanted)), None)


def closure_values(function: types.FunctionType) -> dict[str, Any]:
    """Return name -> value of the variables in a function's closure; None for one that is not set yet."""
    cells = function.__closure__ or ()
    return {name: _cell_content(cell) for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def _walk_closures(value: Any, path: str, depth: int, seen: frozenset[int]) -> Iterator[tuple[str, Any]]:
    if depth > _MAX_DEPTH or id(value) in seen:
        return
    if value is None or isinstance(value, bool | int | float | str):
        yield path, value
    elif isinstance(value, jax.Array | np.ndarray | np.generic):
        yield path, _plain_number(value) if np.size(value) == 1 else f"{value.dtype}{list(np.shape(value))}"
    elif isinstance(value, functools.partial):
        seen |= {id(value)}
        yield from _walk_closures(value.func, path, depth + 1, seen)
        yield from _walk_closures({"args": value.args, **value.keywords}, path, depth + 1, seen)
    elif isinstance(value, types.FunctionType):
        own = value.__qualname__.partition(".")[0]
        path, seen = f"{path}.{own}".lstrip("."), seen | {id(value)}
        held = closure_values(value)
        if not held:
            yield path, "function"
        yield from _walk_closures(held, path, depth + 1, seen)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _walk_closures(item, f"{path}.{name}".lstrip("."), depth + 1, seen)
    elif isinstance(value, tuple | list):
        for number, item in enumerate(value):
            yield from _walk_closures(item, f"{path}[{number}]", depth + 1, seen)
    elif isinstance(value, types.MethodType):
        yield from _walk_closures(value.__self__, path, depth + 1, seen)
    elif isinstance(value, type):
        yield path, f"{value.__module__}.{value.__qualname__}"
    else:
        own = type(value).__qualname__
        yield f"{path}.{own}".lstrip("."), f"{type(value).__module__}.{own}"
        yield from _walk_closures(
            dict(getattr(value, "__dict__", {})), f"{path}.{own}".lstrip("."), depth + 1, seen | {id(value)}
        )


def _plain_number(value: Any) -> Any:
    item = str(value.dtype) if is_key(value) else np.asarray(value).item()
    return item if isinstance(item, bool | int | float | str) else str(item)


def _cell_content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None

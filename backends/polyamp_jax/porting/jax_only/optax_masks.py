"""Parameters to which parts of an optax transformation apply: `mask=`, `optax.masked` and `optax.multi_transform`.

optax keeps masks and labels in the closures of its functions, as trees of flags or as functions of the parameters.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import jax

from polyamp_jax.arrays import path_name
from polyamp_jax.step.optimizer_metadata import closure_values

_MAX_DEPTH: Final = 40
_MASKED: Final = "masked.<locals>.update_fn"
_PARTITION: Final = "partition.<locals>.update_fn"


class MaskedPart(NamedTuple):
    """A transformation that applies to some parameters.

    Attributes:
        inner: the transformation.
        leaves: paths of the parameters; None if the mask cannot be read.
    """

    inner: Any
    leaves: frozenset[str] | None


def masked_parts(transformation: Any, params: Any) -> list[MaskedPart]:
    """Return the parts of a transformation that are masked, the outermost masks alone.

    Args:
        transformation: an optax transformation.
        params: the parameters.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> decay = optax.adamw(1e-3, mask={"w": True, "b": False})
        >>> masked_parts(decay, {"w": jnp.zeros((2, 2)), "b": jnp.zeros(2)})[0].leaves
        frozenset({'w'})
    """
    found = []
    for function in _wrappers(transformation.update, 0, frozenset()):
        held = closure_values(function)
        if function.__qualname__ == _MASKED:
            found.append(MaskedPart(held["inner"], _masked_leaves(held["mask"], params)))
            continue
        labels = _labels(held["param_labels"], params)
        for label, inner in held["transforms"].items():
            chosen = None if labels is None else frozenset(name for name, own in labels.items() if own == label)
            found.append(MaskedPart(inner, chosen))
    return found


def _wrappers(value: Any, depth: int, seen: frozenset[int]) -> Iterator[types.FunctionType]:
    """Yield the functions in closures that apply masks or labels."""
    if depth > _MAX_DEPTH or id(value) in seen:
        return
    seen |= {id(value)}
    if isinstance(value, types.FunctionType):
        held = closure_values(value)
        if (value.__qualname__ == _MASKED and {"inner", "mask"} <= held.keys()) or (
            value.__qualname__ == _PARTITION and {"transforms", "param_labels"} <= held.keys()
        ):
            yield value
            return
        parts: list[Any] = [item for name, item in held.items() if name not in ("init_fns", "init_fn")]
    elif isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, tuple) and hasattr(value, "update"):  # a GradientTransformation
        parts = [value.update]
    elif isinstance(value, tuple | list):
        parts = list(value)
    elif isinstance(value, Mapping):
        parts = list(value.values())
    else:
        return
    for part in parts:
        yield from _wrappers(part, depth + 1, seen)


def _masked_leaves(mask: Any, params: Any) -> frozenset[str] | None:
    flags = _labels(mask, params)
    if flags is None or not all(str(flag) in ("True", "False") for flag in flags.values()):
        return None
    return frozenset(name for name, flag in flags.items() if flag)


def _labels(labels: Any, params: Any) -> dict[str, Any] | None:
    """Return path of a parameter -> its flag or label; None if they cannot be read.

    Args:
        labels: a tree that the parameters' tree begins with, or a function of the parameters.
        params: the parameters.
    """
    try:
        tree = labels(params) if callable(labels) else labels
        full = jax.tree.map(lambda label, part: jax.tree.map(lambda _: label, part), tree, params)
        found = {path_name(keys): label for keys, label in jax.tree_util.tree_leaves_with_path(full)}
    except Exception:  # noqa: BLE001  # a user's function may need what only the loop has
        return None
    names = {path_name(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(params)}
    return found if found.keys() == names else None

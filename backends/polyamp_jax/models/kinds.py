"""What parameter groups ask of a model's parameters (S27). Called by the state.

nnx and equinox keep modules, whose classes tell what a parameter is; linen, haiku and functions keep arrays by name.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from polyamp.rules.kinds import Leaf, class_names
from polyamp_jax import compat
from polyamp_jax.arrays import path_name
from polyamp_jax.models.parts import Parts


def leaves_of(parts: Parts) -> list[Leaf]:
    """Every parameter, in the order of the leaves, with the class of the module that owns it where there is one; of an
    nnx variable that several modules hold, all of them."""
    model = parts.adapter.join(parts.params, parts.running)
    module = model[0] if isinstance(model, tuple) else model
    classes, held = _classes(module), _held(module)
    found = []
    for keys, leaf in jax.tree_util.tree_leaves_with_path(parts.params):
        path = path_name(keys)
        called = held.get(path, (path,))
        owners = [classes[owner] for place in called if (owner := place.rpartition("/")[0]) in classes]
        names = tuple(name for own in owners for name in own)
        found.append(Leaf(path, jnp.ndim(leaf), names if owners else None, called))
    return found


def _held(module: Any) -> dict[str, tuple[str, ...]]:
    """Path of a variable of nnx that is an attribute of a module -> all of its paths."""
    if not compat.is_a(module, "flax.nnx", "Module"):
        return {}
    places: dict[int, list[str]] = {}
    for keys, each in compat.nnx_modules(module):
        for name, value in vars(each).items():
            if compat.is_a(value, "flax.nnx", "Variable"):
                places.setdefault(id(value), []).append("/".join(map(str, (*keys, name))))
    return {path: (path, *(p for p in paths if p != path)) for paths in places.values() for path in paths}


def _classes(module: Any) -> dict[str, tuple[str, ...]]:
    """Path of a module -> the names of its class and its bases; empty where a library has no modules."""
    if compat.is_a(module, "flax.nnx", "Module"):
        return {"/".join(map(str, keys)): class_names(each) for keys, each in compat.nnx_modules(module)}
    if compat.is_a(module, "equinox", "Module"):
        from polyamp_jax.models.equinox import modules_in

        return {path: class_names(each) for path, each in modules_in(module)}
    return {}

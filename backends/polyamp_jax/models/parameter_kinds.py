"""Parameter properties that parameter groups select by (S27).

nnx and equinox models contain modules, whose classes identify the kind of a parameter. linen, haiku and function
models contain only named arrays.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from polyamp.rules.parameter_kinds import ParameterLeaf, class_names
from polyamp_jax import compat
from polyamp_jax.arrays import path_name
from polyamp_jax.models.model_parts import ModelParts


def parameter_leaves(parts: ModelParts) -> list[ParameterLeaf]:
    """Return every parameter, in the order of the leaves, with the class of its owning module if there is one.

    A shared nnx variable has the classes of all modules that own it.
    """
    model = parts.adapter.join(parts.params, parts.running)
    module = model[0] if isinstance(model, tuple) else model
    classes, held = _module_classes(module), _shared_paths(module)
    found = []
    for keys, leaf in jax.tree_util.tree_leaves_with_path(parts.params):
        path = path_name(keys)
        called = held.get(path, (path,))
        owners = [classes[owner] for place in called if (owner := place.rpartition("/")[0]) in classes]
        names = tuple(name for own in owners for name in own)
        found.append(ParameterLeaf(path, jnp.ndim(leaf), names if owners else None, called))
    return found


def _shared_paths(module: Any) -> dict[str, tuple[str, ...]]:
    """Return a mapping from each path of an nnx variable that is a module attribute to all of its paths."""
    if not compat.is_a(module, "flax.nnx", "Module"):
        return {}
    places: dict[int, list[str]] = {}
    for keys, each in compat.walk_nnx_modules(module):
        for name, value in vars(each).items():
            if compat.is_a(value, "flax.nnx", "Variable"):
                places.setdefault(id(value), []).append("/".join(map(str, (*keys, name))))
    return {path: (path, *(p for p in paths if p != path)) for paths in places.values() for path in paths}


def _module_classes(module: Any) -> dict[str, tuple[str, ...]]:
    """Return module path -> names of its class and base classes; empty if the library has no modules."""
    if compat.is_a(module, "flax.nnx", "Module"):
        return {"/".join(map(str, keys)): class_names(each) for keys, each in compat.walk_nnx_modules(module)}
    if compat.is_a(module, "equinox", "Module"):
        from polyamp_jax.models.equinox import walk_modules

        return {path: class_names(each) for path, each in walk_modules(module)}
    return {}

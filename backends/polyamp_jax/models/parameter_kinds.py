"""Parameter properties that parameter groups select by (S27).

nnx and equinox models contain modules, whose classes identify the kind of a parameter. linen, haiku and function
models contain only named arrays.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from polyamp.rules.parameter_kinds import ParameterLeaf, class_names
from polyamp_jax.arrays import path_name
from polyamp_jax.models.adapter import ModelParts


def parameter_leaves(parts: ModelParts) -> list[ParameterLeaf]:
    """Return every parameter, in the order of the leaves, with the class of its owning module if there is one.

    A shared nnx variable has the classes of all modules that own it.
    """
    modules = parts.adapter.modules(parts.params, parts.running)
    shared = parts.adapter.parameter_paths(modules)
    found = []
    for keys, leaf in jax.tree_util.tree_leaves_with_path(parts.params):
        path = path_name(keys)
        paths = shared.get(path, (path,))
        owners = [modules[owner] for each in paths if (owner := each.rpartition("/")[0]) in modules]
        names = tuple(name for owner in owners for name in class_names(owner))
        found.append(ParameterLeaf(path, jnp.ndim(leaf), names if owners else None, paths))
    return found

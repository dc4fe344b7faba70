"""What parameter groups ask of a model's parameters (S27). Called by the state.

nnx and equinox keep modules, whose classes tell what a parameter is; linen, haiku and functions keep arrays by name.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from polyamp.rules.kinds import Leaf, class_names
from polyamp_jax import compat
from polyamp_jax.arrays import path_name
from polyamp_jax.models.parts import Parts


def leaves_of(parts: Parts) -> list[Leaf]:
    """Every parameter, in the order of the leaves, with the class of the module that owns it where there is one."""
    classes = _classes(parts)
    found = []
    for keys, leaf in jax.tree_util.tree_leaves_with_path(parts.params):
        path = path_name(keys)
        found.append(Leaf(path, jnp.ndim(leaf), classes.get(path.rpartition("/")[0])))
    return found


def _classes(parts: Parts) -> dict[str, tuple[str, ...]]:
    """Path of a module -> the names of its class and its bases; empty where a library has no modules."""
    model = parts.adapter.join(parts.params, parts.running)
    module = model[0] if isinstance(model, tuple) else model
    if compat.is_a(module, "flax.nnx", "Module"):
        return {"/".join(map(str, keys)): class_names(each) for keys, each in compat.nnx_modules(module)}
    if compat.is_a(module, "equinox", "Module"):
        from polyamp_jax.models.equinox import modules_in

        return {path: class_names(each) for path, each in modules_in(module)}
    return {}

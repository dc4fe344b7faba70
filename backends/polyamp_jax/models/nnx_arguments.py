"""Handling of nnx objects in the arguments of a model call: random streams, metrics, other modules.

Such an object is a pytree, so any map over the arguments copies it. Changes that the call makes to the copy, such as
an advanced stream, would be lost. This module therefore works in three stages:

1. It takes the objects out of the arguments.
2. It rebuilds them from their arrays inside the call.
3. It writes the changes back into the caller's objects.

If those belong to another trace, as everything outside a step does, flax raises, and `step` explains what to do.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from polyamp_jax import compat
from polyamp_jax.arrays import is_key, is_same_tree


@dataclasses.dataclass(frozen=True)
class ArgumentObjects:
    """Objects that were taken out of arguments.

    Attributes:
        objects: the caller's own objects, in the order of the arguments.
        graphdef: the definition from which copies of them are built.
        arrays: the arrays of the objects.
    """

    objects: list[Any]
    graphdef: Any
    arrays: Any

    def rebuild(self, arrays: Any) -> list[Any]:
        """Return copies of the caller's objects that contain `arrays` and belong to the current trace."""
        made: list[Any] = _nnx_module().merge(self.graphdef, arrays)
        return made

    def changed_arrays(self, objects: list[Any], arrays: Any) -> Any:
        """Return the arrays of `objects`, which `rebuild` made from `arrays`; None if the call changed none of them."""
        after = _object_arrays(objects)[1]
        return None if is_same_tree(after, arrays) else after

    def put_back(self, arrays: Any) -> None:
        """Write the arrays that the call changed into the caller's objects, in the dtypes of those objects."""
        if arrays is None:
            return
        structure: Any = jax.tree.structure(arrays)
        if structure == jax.tree.structure(self.arrays):
            arrays = jax.tree.map(
                lambda new, old: new if is_key(old) else jnp.asarray(new, jnp.result_type(old)), arrays, self.arrays
            )
        _nnx_module().update(self.objects, arrays)


def extract_objects(args: Any, kwargs: Any) -> tuple[Any, Any, ArgumentObjects | None]:
    """Return the arguments with an `ObjectPlaceholder` for every nnx object, and the objects or None."""
    kinds = compat.nnx_classes()
    if not kinds:
        return args, kwargs, None
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=lambda node: isinstance(node, kinds))
    objects = [leaf for leaf in leaves if isinstance(leaf, kinds)]
    if not objects:
        return args, kwargs, None
    numbers = iter(range(len(objects)))
    args, kwargs = jax.tree.unflatten(
        structure, [ObjectPlaceholder(next(numbers)) if isinstance(leaf, kinds) else leaf for leaf in leaves]
    )
    return args, kwargs, ArgumentObjects(objects, *_object_arrays(objects))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ObjectPlaceholder:
    """Placeholder for an object that was taken out of the arguments."""

    number: int


def insert_objects(args: Any, kwargs: Any, objects: list[Any]) -> tuple[Any, Any]:
    """Return the arguments with every placeholder replaced by its object."""
    made: tuple[Any, Any] = jax.tree.map(
        lambda leaf: objects[leaf.number] if isinstance(leaf, ObjectPlaceholder) else leaf,
        (args, kwargs),
        is_leaf=lambda leaf: isinstance(leaf, ObjectPlaceholder),
    )
    return made


def _object_arrays(objects: list[Any]) -> tuple[Any, Any]:
    nnx = _nnx_module()
    graphdef, state = nnx.split(objects)
    return graphdef, nnx.to_pure_dict(state)


def _nnx_module() -> Any:
    return compat.loaded_module("flax.nnx")

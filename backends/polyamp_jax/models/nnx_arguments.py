"""nnx objects among the arguments of a model call: random streams, metrics, other modules. Called by `bound`.

Such an object is a pytree, so that whatever maps over arguments makes a copy of it, and what the call changes in the
copy (a stream that moves on) would be lost. Here the objects are taken out of the arguments, made anew inside the call
from their arrays, and what the call changed is put back into the caller's own objects. Where these belong to another
trace, as everything outside a step does, flax refuses that, and `step` says what to do.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from polyamp_jax import compat
from polyamp_jax.arrays import is_key


@dataclasses.dataclass(frozen=True)
class Taken:
    """Objects that were taken out of arguments.

    Attributes:
        objects: the caller's own, in the order of the arguments.
        graphdef: how to make others like them.
        arrays: theirs.
    """

    objects: list[Any]
    graphdef: Any
    arrays: Any

    def anew(self, arrays: Any) -> list[Any]:
        """Objects like the caller's, of this trace, around `arrays`."""
        made: list[Any] = _nnx().merge(self.graphdef, arrays)
        return made

    def changed(self, objects: list[Any], arrays: Any) -> Any:
        """The arrays of objects that `anew` made from `arrays`, if a call changed one; None if not."""
        after = _arrays(objects)[1]
        leaves, structure = _flat(after)
        before, same = _flat(arrays)
        return None if structure == same and all(a is b for a, b in zip(leaves, before, strict=True)) else after

    def put_back(self, arrays: Any) -> None:
        """Change the caller's objects as the call changed those in their place, in their own dtypes."""
        if arrays is None:
            return
        if _flat(arrays)[1] == _flat(self.arrays)[1]:
            arrays = jax.tree.map(
                lambda new, old: new if is_key(old) else jnp.asarray(new, jnp.result_type(old)), arrays, self.arrays
            )
        _nnx().update(self.objects, arrays)


def take_out(args: Any, kwargs: Any) -> tuple[Any, Any, Taken | None]:
    """The arguments with a `Place` for every nnx object, and the objects; None if there are none."""
    kinds = compat.nnx_kinds()
    if not kinds:
        return args, kwargs, None
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=lambda node: isinstance(node, kinds))
    objects = [leaf for leaf in leaves if isinstance(leaf, kinds)]
    if not objects:
        return args, kwargs, None
    numbers = iter(range(len(objects)))
    args, kwargs = jax.tree.unflatten(
        structure, [Place(next(numbers)) if isinstance(leaf, kinds) else leaf for leaf in leaves]
    )
    return args, kwargs, Taken(objects, *_arrays(objects))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Place:
    """Stands for an object that was taken out."""

    number: int


def put_in(args: Any, kwargs: Any, objects: list[Any]) -> tuple[Any, Any]:
    """The arguments with objects in their places."""
    made: tuple[Any, Any] = jax.tree.map(
        lambda leaf: objects[leaf.number] if isinstance(leaf, Place) else leaf,
        (args, kwargs),
        is_leaf=lambda leaf: isinstance(leaf, Place),
    )
    return made


def _arrays(objects: list[Any]) -> tuple[Any, Any]:
    nnx = _nnx()
    graphdef, state = nnx.split(objects)
    return graphdef, nnx.to_pure_dict(state)


def _flat(tree: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(tree)


def _nnx() -> Any:
    return compat.loaded("flax.nnx")

"""`ArrayPlace`, the position of an array in a model's pytree, and replacement of the arrays at such positions.

The inventories of equinox, haiku and plain functions use places. The model's leaves are numbered once, and reading and
writing use the same numbers. A layer of a stack made by `jax.vmap` is a slice of a leaf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.porting.layouts.inventory import InventoryLeaf
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp_jax.arrays import shape_struct
from polyamp_jax.porting.jax_only.lazy_leaves import array_like, to_lazy

LARGE_COUNT: Final = 2**30
"""A step counter so large that a moving average with it gets no bias correction."""


@dataclasses.dataclass(frozen=True)
class ArrayPlace:
    """One leaf of a model, or a slice of it.

    Attributes:
        number: number of the leaf, in the order of `jax.tree.leaves`.
        leaf: the leaf: an array, a `jax.ShapeDtypeStruct`, or another value in a module (a function, a rate).
        index: index of the slice along the first axes; empty for the whole leaf.
    """

    number: int
    leaf: Any
    index: tuple[int, ...] = ()

    @property
    def is_array(self) -> bool:
        """Whether the leaf is an array or the shape of one."""
        return isinstance(self.leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)

    @property
    def is_weight(self) -> bool:
        """Whether the leaf is an array of floating or complex numbers, so no counter or random key."""
        return self.is_array and bool(jnp.issubdtype(self.leaf.dtype, jnp.inexact))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the leaf or slice."""
        return tuple(self.leaf.shape[len(self.index) :])

    @property
    def value(self) -> Any:
        """The leaf, for a module that is inspected; for a slice only its shape."""
        return shape_struct(self.shape, self.leaf.dtype) if self.index else self.leaf

    @property
    def array(self) -> Any:
        """The array or slice; a `jax.ShapeDtypeStruct` if the leaf is one."""
        if not self.index:
            return self.leaf
        return self.value if isinstance(self.leaf, jax.ShapeDtypeStruct) else self.leaf[self.index]

    def slice_at(self, number: int) -> ArrayPlace:
        """Return the place of one slice along the first remaining axis."""
        return dataclasses.replace(self, index=(*self.index, number))


@dataclasses.dataclass(frozen=True)
class Weight:
    """An array of an inventory: how it is read, and which leaves are written for a new value.

    Attributes:
        place: its place in the model.
        trainable: False for running statistics.
        read: returns its value if that differs from the leaf, as for a bias-corrected moving average.
        copies: leaves that get the same value; haiku's moving averages store it twice.
        counters: number of another leaf -> the value that it gets, such as a counter.
        tied: name of the weight that it is tied to; None for an independent one.
        origin: place of that weight; `place` then only has the shape here.
    """

    place: ArrayPlace
    trainable: bool = True
    read: Callable[[], Any] | None = None
    copies: tuple[int, ...] = ()
    counters: Mapping[int, int | bool] = dataclasses.field(default_factory=dict)
    tied: str | None = None
    origin: ArrayPlace | None = None

    @property
    def array(self) -> Any:
        """Its value; a `jax.ShapeDtypeStruct` if there is none."""
        if self.read is None or isinstance((self.origin or self.place).leaf, jax.ShapeDtypeStruct):
            return self.place.array
        return self.read()

    def lazy(self, name: str) -> Lazy:
        """Return its value as a lazy array."""
        leaf = to_lazy(name, self.place.leaf)
        if isinstance((self.origin or self.place).leaf, jax.ShapeDtypeStruct):
            return Lazy(self.place.shape, leaf.dtype, leaf.read)
        if self.read is not None:
            return Lazy(self.place.shape, leaf.dtype, lambda: np.asarray(self.array, leaf.dtype))
        return Lazy(self.place.shape, leaf.dtype, lambda: leaf.read()[self.place.index]) if self.place.index else leaf

    def inventory_leaf(self, name: str) -> InventoryLeaf:
        """Return it as a leaf of an inventory."""
        return InventoryLeaf(name, self.lazy(name), self.trainable, self.tied)


def number_leaves(tree: Any) -> Any:
    """Return a pytree with every leaf replaced by its `ArrayPlace`."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [ArrayPlace(number, leaf) for number, leaf in enumerate(leaves)])


def replace_leaves(tree: Any, weights: Mapping[str, Weight], values: Mapping[str, Any]) -> Any:
    """Return a model with other arrays in the places of these weights; can be traced.

    Args:
        tree: the model.
        weights: name -> weight.
        values: name -> array.
    """
    leaves, structure = jax.tree.flatten(tree)
    parts: dict[int, dict[tuple[int, ...], Any]] = {}
    counters: dict[int, int | bool] = {}
    for name, value in values.items():
        weight = weights[name]
        counters.update(weight.counters)
        for number in (weight.place.number, *weight.copies):
            parts.setdefault(number, {})[weight.place.index] = value
    for number, by_index in parts.items():
        leaves[number] = by_index[()] if () in by_index else _stack_slices(leaves[number], by_index)
    for number, value in counters.items():
        leaf = leaves[number]
        leaves[number] = array_like(leaf, np.full(leaf.shape, value, leaf.dtype))
    return jax.tree.unflatten(structure, leaves)


def _stack_slices(leaf: Any, parts: Mapping[tuple[int, ...], Any]) -> Any:
    """Return a leaf with some slices replaced; the others are unchanged."""
    lead = leaf.shape[: len(next(iter(parts)))]
    rows = [parts[index] if index in parts else leaf[index] for index in np.ndindex(*lead)]
    if any(isinstance(row, jax.core.Tracer) for row in rows):
        return jnp.stack(rows).reshape(leaf.shape)
    made = np.empty(leaf.shape, rows[0].dtype)
    for index, row in zip(np.ndindex(*lead), rows, strict=True):
        made[index] = row
    return array_like(leaf, made)

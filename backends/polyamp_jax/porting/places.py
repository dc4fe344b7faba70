"""`Place`: where an array of an inventory lies in a model's pytree, and writing other arrays there.

equinox's, haiku's and plain functions' inventories are made of places: the leaves of the model are numbered once, and
what reads and what writes speaks of the same numbers. A layer of a stack that `jax.vmap` made is a slice of one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.porting.layouts.lazy import Lazy
from polyamp_jax.porting.leaves import lazy

LONG: Final = 2**30
"""A step counter so high that a moving average with it is no longer corrected for its start."""


@dataclasses.dataclass(frozen=True)
class Place:
    """One leaf of a model, or a slice of it.

    Attributes:
        number: of the leaf, in the order of `jax.tree.leaves`.
        held: the leaf: an array, a `jax.ShapeDtypeStruct`, or whatever else a module has (a function, a rate).
        index: of the slice along the first axes; empty for the whole leaf.
    """

    number: int
    held: Any
    index: tuple[int, ...] = ()

    @property
    def is_array(self) -> bool:
        """Whether it is an array, or stands for one."""
        return isinstance(self.held, jax.Array | np.ndarray | jax.ShapeDtypeStruct)

    @property
    def is_weight(self) -> bool:
        """Whether it is an array of floating or complex numbers: counters and random keys are none."""
        return self.is_array and bool(jnp.issubdtype(self.held.dtype, jnp.inexact))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the slice."""
        return tuple(self.held.shape[len(self.index) :])

    @property
    def value(self) -> Any:
        """What a module that is looked at has in this place; of a slice its shape alone."""
        return _struct(self.shape, self.held.dtype) if self.index else self.held

    @property
    def array(self) -> Any:
        """The array itself, or the slice; of a shape without values the same."""
        if not self.index:
            return self.held
        return self.value if isinstance(self.held, jax.ShapeDtypeStruct) else self.held[self.index]

    def part(self, number: int) -> Place:
        """One along the first axis."""
        return dataclasses.replace(self, index=(*self.index, number))


@dataclasses.dataclass(frozen=True)
class Weight:
    """An array of an inventory: what is read, and what is written when it is given a value.

    Attributes:
        place: where it lies.
        trainable: False for running statistics.
        read: its value, where that is not what lies there (a moving average that is corrected for its start).
        same: leaves that get the same value: haiku's moving averages keep it twice.
        settled: number of a leaf -> what it becomes, a counter for one.
        tied: the name of the weight that it is, if it is none of its own.
        origin: where that one lies; `place` then has its shape here alone.
    """

    place: Place
    trainable: bool = True
    read: Callable[[], Any] | None = None
    same: tuple[int, ...] = ()
    settled: Mapping[int, int | bool] = dataclasses.field(default_factory=dict)
    tied: str | None = None
    origin: Place | None = None

    @property
    def array(self) -> Any:
        """Its value; a `jax.ShapeDtypeStruct` where there is none."""
        if self.read is None or isinstance((self.origin or self.place).held, jax.ShapeDtypeStruct):
            return self.place.array
        return self.read()

    def lazy(self, name: str) -> Lazy:
        """The same, read late."""
        held = lazy(name, self.place.held)
        if isinstance((self.origin or self.place).held, jax.ShapeDtypeStruct):
            return Lazy(self.place.shape, held.dtype, held.read)
        if self.read is not None:
            return Lazy(self.place.shape, held.dtype, lambda: np.asarray(self.array, held.dtype))
        return Lazy(self.place.shape, held.dtype, lambda: held.read()[self.place.index]) if self.place.index else held


def numbered(tree: Any) -> Any:
    """A pytree with the place of every leaf in its stead."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [Place(number, leaf) for number, leaf in enumerate(leaves)])


def replaced(tree: Any, weights: Mapping[str, Weight], values: Mapping[str, Any]) -> Any:
    """A model with other arrays in the places of these weights; can be traced.

    Args:
        tree: the model.
        weights: name -> where it lies.
        values: name -> array.
    """
    leaves, structure = jax.tree.flatten(tree)
    parts: dict[int, dict[tuple[int, ...], Any]] = {}
    settled: dict[int, int | bool] = {}
    for name, value in values.items():
        weight = weights[name]
        settled.update(weight.settled)
        for number in (weight.place.number, *weight.same):
            parts.setdefault(number, {})[weight.place.index] = value
    for number, by_index in parts.items():
        leaves[number] = by_index[()] if () in by_index else _stacked(leaves[number], by_index)
    for number, value in settled.items():
        held = leaves[number]
        leaves[number] = _like(held, np.full(held.shape, value, held.dtype))
    return jax.tree.unflatten(structure, leaves)


def _stacked(held: Any, parts: Mapping[tuple[int, ...], Any]) -> Any:
    """The slices of a leaf in one array again; those that are not given are as they were."""
    lead = held.shape[: len(next(iter(parts)))]
    rows = [parts[index] if index in parts else held[index] for index in np.ndindex(*lead)]
    if any(isinstance(row, jax.core.Tracer) for row in rows):
        return jnp.stack(rows).reshape(held.shape)
    made = np.empty(held.shape, rows[0].dtype)
    for index, row in zip(np.ndindex(*lead), rows, strict=True):
        made[index] = row
    return _like(held, made)


def _like(held: Any, values: Any) -> Any:
    if isinstance(held, np.ndarray):
        return values
    sharding = held.sharding if getattr(held, "committed", True) else None
    return jax.device_put(values, sharding if isinstance(sharding, jax.sharding.Sharding) else None)


def _struct(shape: tuple[int, ...], dtype: Any) -> Any:
    struct: Any = jax.ShapeDtypeStruct
    return struct(shape, dtype)

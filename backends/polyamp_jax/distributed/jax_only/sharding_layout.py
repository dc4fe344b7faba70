"""Shardings of a state's arrays on a device mesh, found on the host and passed to the compiled functions (S9).

Inside a trace, an array on a mesh with automatic axes does not expose its sharding. A `ShardingLayout` provides it:
the norm of the gradients is computed shard by shard, and the results of a step keep their placement. A state on one
device has no layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from polyamp_jax import compat
from polyamp_jax.arrays import is_key


class ShardingLayout:
    """Shardings of a state's arrays in the order of its leaves, with the parameters first.

    Static: compares by value and computes its hash once, because `jit` uses both at every call.

    Attributes:
        shardings: the sharding of each leaf, or None if it is not a `NamedSharding`.
    """

    __slots__ = ("_hash", "shardings")

    def __init__(self, shardings: tuple[NamedSharding | None, ...]) -> None:
        self.shardings = shardings
        self._hash = hash(shardings)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShardingLayout):
            return NotImplemented
        return self is other or (self._hash == other._hash and self.shardings == other.shardings)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> str | tuple[Any, ...]:
        return _unknown_layout, ()  # unpickled arrays are on one device

    def keep_shardings(self, leaves: Sequence[Any]) -> list[Any]:
        """Constrain leaves to the shardings of the state's own leaves. None stays None.

        `leaves` are those of a state, or like its first leaves, such as the gradients of its parameters.
        """
        return [self._place_leaf(number, leaf) for number, leaf in enumerate(leaves)]

    def _place_leaf(self, number: int, leaf: Any) -> Any:
        place = self.shardings[number]
        if leaf is None or place is None or is_key(leaf) or _has_explicit_axes(place.mesh):
            return leaf  # shardings over explicit axes are part of an array's type, which the step keeps anyway
        return jax.lax.with_sharding_constraint(leaf, place)  # type: ignore[no-untyped-call]  # not annotated in JAX

    def map_shards(self, function: Callable[..., Any], leaves: Sequence[Any]) -> Any | None:
        """Run `function(list of shards)` on each device's shards and return its result, the same on every device.

        Args:
            function: runs inside `shard_map`.
            leaves: the parameters' leaves, or like them; None for a leaf to leave out.

        Returns:
            The result, or None if no leaf is sharded or the leaves are not on one mesh.
        """
        found = [(leaf, place) for leaf, place in zip(leaves, self.shardings, strict=False) if leaf is not None]
        places = [place for _, place in found if place is not None]
        meshes = {place.mesh for place in places}
        if len(places) < len(found) or len(meshes) != 1 or all(place.is_fully_replicated for place in places):
            return None
        (mesh,) = meshes
        around = jax.sharding.get_abstract_mesh()
        if not around.empty and around != mesh.abstract_mesh:
            return None  # a mesh of `jax.set_mesh`, with which shard_map would conflict
        everywhere = _replicated_spec()
        mapped: Any = jax.shard_map(
            lambda *shards: function(list(shards)),
            mesh=mesh,
            in_specs=tuple(place.spec for place in places),
            out_specs=everywhere,
        )
        return mapped(*(leaf for leaf, _ in found))


def find_sharding_layout(leaves: Sequence[Any]) -> ShardingLayout | None:
    """Return the layout of a state with these leaves; None on one device, or inside a trace, where it is unknown."""
    shardings: list[NamedSharding | None] = []
    several = False
    for leaf in leaves:
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            return None
        place = leaf.sharding
        several = several or place.num_devices > 1
        shardings.append(place if isinstance(place, NamedSharding) else None)
    return ShardingLayout(tuple(shardings)) if several else None


def usable_layout(layout: ShardingLayout | None) -> ShardingLayout | None:
    """Return the layout, or None inside `shard_map` and `pmap`, where each device sees its own shards."""
    return None if layout is None or compat.mapped_axes() else layout


def is_auto_sharded(leaf: Any) -> bool:
    """Return whether an array or tracer may be on several devices among which XLA partitions the work."""
    place: Any = getattr(jax.typeof(leaf), "sharding", None)
    mesh: Any = getattr(place, "mesh", None)
    if mesh is None or mesh.empty:
        return False
    types = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return any(size > 1 and kind != AxisType.Manual for size, kind in types)


def row_shard_counts(batch: Any) -> tuple[int, ...] | None:
    """Return the number of shards of each array of a batch along axis 0, or None if no array is sharded there."""
    counts = tuple(_row_shard_count(leaf) for leaf in jax.tree.leaves(batch))
    return counts if any(count > 1 for count in counts) else None


def _row_shard_count(leaf: Any) -> int:
    place = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
    if isinstance(leaf, jax.core.Tracer):
        place = getattr(jax.typeof(leaf), "sharding", None)  # known for explicit axes
    if not isinstance(place, NamedSharding) or not place.spec or place.spec[0] is None:
        return 1
    names = place.spec[0] if isinstance(place.spec[0], tuple) else (place.spec[0],)
    count = 1
    for name in names:
        count *= place.mesh.shape[name]
    return count


def scalar_placement(like: jax.Array) -> Any:
    """Return the placement of a scalar that matches `like`: the same device, or replicated over the same mesh."""
    if isinstance(like.sharding, NamedSharding):
        return NamedSharding(like.sharding.mesh, _replicated_spec())
    return next(iter(like.devices()))


def gather_array(leaf: Any) -> Any:
    """Return an array that every process can read. An array divided among processes is gathered; all must call this."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer) or leaf.is_fully_addressable:
        return leaf
    return leaf if leaf.is_fully_replicated else jax.jit(lambda x: x, out_shardings=scalar_placement(leaf))(leaf)


def commit_to_devices(tree: Any, like: Sequence[Any]) -> Any:
    """Commit all arrays of a tree to the devices of `like`, if any array of `like` is committed.

    A step's results are committed, so a mixture would compile the second step again. Committed arrays stay in place.
    The others are replicated over the devices of the array of `like` that is on the most devices.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in like):
        return tree
    committed = [leaf for leaf in like if leaf.committed]
    if not committed:
        return tree
    widest = max(committed, key=lambda leaf: leaf.sharding.num_devices)

    def one(leaf: Any) -> Any:
        if leaf.committed:
            return leaf
        place = scalar_placement(widest)
        if isinstance(place, NamedSharding) and _has_explicit_axes(
            place.mesh
        ):  # the form in the type of the step's result
            place = NamedSharding(place.mesh, _replicated_spec(leaf.ndim))
        if is_key(leaf):  # `device_put` moves keys only to devices of this process
            data = _put_on_devices(jax.random.key_data(leaf), place)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        return _put_on_devices(leaf, place)

    return jax.tree.map(one, tree)


def _put_on_devices(leaf: Any, place: Any) -> Any:
    """Run `device_put`, through the host if other processes own devices of `place`.

    For an array on a device, jax 0.10 would return one whose shards cannot be read, so that orbax cannot write it.
    """
    elsewhere = isinstance(place, NamedSharding) and not place.is_fully_addressable
    return jax.device_put(np.asarray(leaf) if elsewhere else leaf, place)


def _replicated_spec(axes: int = 0) -> PartitionSpec:
    return PartitionSpec(*[None] * axes)  # type: ignore[no-untyped-call]  # JAX does not annotate it


def _has_explicit_axes(mesh: Any) -> bool:
    return not isinstance(mesh, Mesh) or any(kind != AxisType.Auto for kind in mesh.axis_types)


def _unknown_layout() -> Any:
    return ...

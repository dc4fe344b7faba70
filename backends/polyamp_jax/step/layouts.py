"""Where the arrays of a state lie on a mesh of devices, known on the host and handed to the compiled functions (S9).

Inside a trace an array of a mesh with automatic axes does not say how it is sharded. A `Layout` does: the gradients'
norm is made shard by shard with it, and what comes out of a step lies where it lay before. A state on one device has
none, and nothing here is asked. Called by `state`, `step`, `differentiate`, `measure` and `update`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from polyamp_jax import compat
from polyamp_jax.arrays import is_key


class Layout:
    """The shardings of a state's arrays, in the order of its leaves; those of the parameters come first.

    Static: compared by value and hashed once, as `jit` asks for both at every call.

    Attributes:
        shardings: of each leaf; None where it is no `NamedSharding`.
    """

    __slots__ = ("_hash", "shardings")

    def __init__(self, shardings: tuple[NamedSharding | None, ...]) -> None:
        self.shardings = shardings
        self._hash = hash(shardings)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self is other or (self._hash == other._hash and self.shardings == other.shardings)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> str | tuple[Any, ...]:
        return _unknown, ()  # arrays that were pickled come back on one device

    def kept(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves of a state, or the first of them such as its parameters' gradients, where the state's own lie;
        None stays."""
        return [self._placed(number, leaf) for number, leaf in enumerate(leaves)]

    def _placed(self, number: int, leaf: Any) -> Any:
        place = self.shardings[number]
        if leaf is None or place is None or is_key(leaf) or _explicit(place.mesh):
            return leaf  # shardings over explicit axes are part of an array's type, which the step keeps anyway
        return jax.lax.with_sharding_constraint(leaf, place)  # type: ignore[no-untyped-call]  # JAX does not annotate it

    def by_shards(self, function: Callable[..., Any], leaves: Sequence[Any]) -> Any | None:
        """`function(list of shards)`, whose results are the same on every device, run on each device's shards.

        Args:
            function: runs inside `shard_map`.
            leaves: of the parameters, or like them; None for one that takes no part.

        Returns:
            None where none of the leaves is divided, or they do not lie on one mesh.
        """
        found = [(leaf, place) for leaf, place in zip(leaves, self.shardings, strict=False) if leaf is not None]
        places = [place for _, place in found if place is not None]
        meshes = {place.mesh for place in places}
        if len(places) < len(found) or len(meshes) != 1 or all(place.is_fully_replicated for place in places):
            return None
        (mesh,) = meshes
        around = jax.sharding.get_abstract_mesh()
        if not around.empty and around != mesh.abstract_mesh:
            return None  # of `jax.set_mesh`, which shard_map would hold against this one
        everywhere = _everywhere()
        mapped: Any = jax.shard_map(
            lambda *shards: function(list(shards)),
            mesh=mesh,
            in_specs=tuple(place.spec for place in places),
            out_specs=everywhere,
        )
        return mapped(*(leaf for leaf, _ in found))


def layout_of(leaves: Sequence[Any]) -> Layout | None:
    """The layout of a state with these leaves; None on one device, and inside a trace, where it is not known."""
    shardings: list[NamedSharding | None] = []
    several = False
    for leaf in leaves:
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            return None
        place = leaf.sharding
        several = several or place.num_devices > 1
        shardings.append(place if isinstance(place, NamedSharding) else None)
    return Layout(tuple(shardings)) if several else None


def usable(layout: Layout | None) -> Layout | None:
    """The layout, but inside `shard_map` and `pmap` none: there each device sees its own shards."""
    return None if layout is None or compat.mapped_axes() else layout


def spread(leaf: Any) -> bool:
    """Whether an array or tracer may lie on several devices, among which XLA divides the work by itself."""
    place: Any = getattr(jax.typeof(leaf), "sharding", None)
    mesh: Any = getattr(place, "mesh", None)
    if mesh is None or mesh.empty:
        return False
    types = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return any(size > 1 and kind != AxisType.Manual for size, kind in types)


def shards_of_rows(batch: Any) -> tuple[int, ...] | None:
    """Into how many shards each array of a batch is divided along axis 0; None where none of them is."""
    counts = tuple(_shards(leaf) for leaf in jax.tree.leaves(batch))
    return counts if any(count > 1 for count in counts) else None


def _shards(leaf: Any) -> int:
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
    """Where a scalar that goes with `like` lies: on the same device, or replicated over the same mesh."""
    if isinstance(like.sharding, NamedSharding):
        return NamedSharding(like.sharding.mesh, _everywhere())
    return next(iter(like.devices()))


def whole(leaf: Any) -> Any:
    """An array that every process can read; one that is divided among processes is gathered, and all of them ask."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer) or leaf.is_fully_addressable:
        return leaf
    return leaf if leaf.is_fully_replicated else jax.jit(lambda x: x, out_shardings=scalar_placement(leaf))(leaf)


def settled(tree: Any, like: Sequence[Any]) -> Any:
    """A tree with all of it committed where the arrays of `like` are, if any of them is: a step's results will be, and
    a mixture would compile the second step anew.

    What is committed stays where it is. The rest goes beside the array that lies on the most devices, whole on each.
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
        if isinstance(place, NamedSharding) and _explicit(place.mesh):  # as the type of the step's result spells it
            place = NamedSharding(place.mesh, _everywhere(leaf.ndim))
        if is_key(leaf):  # which `device_put` takes to devices of this process alone
            data = _put(jax.random.key_data(leaf), place)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        return _put(leaf, place)

    return jax.tree.map(one, tree)


def _put(leaf: Any, place: Any) -> Any:
    """`device_put`, through the host where other processes have devices of `place`: of an array that lies on a device,
    jax 0.10 makes one there whose shards cannot be read, so that orbax cannot write it."""
    elsewhere = isinstance(place, NamedSharding) and not place.is_fully_addressable
    return jax.device_put(np.asarray(leaf) if elsewhere else leaf, place)


def _everywhere(axes: int = 0) -> PartitionSpec:
    return PartitionSpec(*[None] * axes)  # type: ignore[no-untyped-call]  # JAX does not annotate it


def _explicit(mesh: Any) -> bool:
    return not isinstance(mesh, Mesh) or any(kind != AxisType.Auto for kind in mesh.axis_types)


def _unknown() -> Any:
    return ...

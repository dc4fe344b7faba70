"""A step inside `shard_map` or `pmap`: which axes its replicas are, and what is averaged over them (S9).

In a `shard_map` that checks how values vary (`check_vma=True`, the default) JAX sums the gradient of whatever is the
same on all replicas by itself. So the loss is averaged over the axes on which it varies *before* it is differentiated,
and the gradients are its mean's, those of parameters that are sharded by the user too. Averaging gradients behind
`jax.grad` instead would leave the sum.

Without the checks, and in `pmap`, JAX sums nothing and says nothing: the replica's own gradients are averaged over
`axis_name`. The same is done in a window of micro-batches (S8), with the parameters made to vary, so that replicas sum
once at its end. `vmap` makes no replicas, whatever its axis is called. Called by the halves of the step and by
`own_loop`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from polyamp.errors import ArgumentError, UnsupportedError
from polyamp.rules.weights import Totals
from polyamp_jax import compat
from polyamp_jax.arrays import is_key, path_name
from polyamp_jax.models.parts import Keys, Running

AxisName = str | tuple[str, ...] | None
"""What `axis_name=` takes."""
_LAX: Final[Any] = jax.lax  # JAX does not annotate its collectives


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The replicas around what is being traced.

    Attributes:
        checked: whether JAX knows how values vary over them.
        rows: axes over which the batch is divided; each has random masks of its own.
        later: axes over which gradients are each replica's own until `mean`; over all others JAX has summed them.
    """

    checked: bool
    rows: tuple[Any, ...]
    later: tuple[Any, ...]

    def own(self, tree: Any) -> Any:
        """Arrays as each replica's own: the gradients by them are not summed."""
        return jax.tree.map(self._own, tree)

    def _own(self, leaf: Any) -> Any:
        if not self.checked or is_key(leaf):
            return leaf
        missing = [axis for axis in self.later if axis not in compat.varying(leaf)]
        return compat.vary(leaf, missing) if missing else leaf

    def loss(self, loss: Any, weight: Any = None) -> tuple[Any, Any]:
        """The loss as it is differentiated: its mean over the axes on which it varies, but for those of `later`; and
        the sum of the weights that replicas count by, where they have some (S9), in the same reduction."""
        axes = compat.varying(loss) - set(self.later)
        if weight is None:
            return self._own(averaged(loss, axes)), None
        axes |= compat.varying(weight) - set(self.later)
        if axes:
            pair = [compat.vary(part, sorted(axes - compat.varying(part))) for part in (loss * weight, weight)]
            total, weight = _LAX.psum(pair, tuple(sorted(axes)))
            loss = total / jnp.where(weight > 0.0, weight, 1.0)
        return self._own(loss), self._own(weight)

    def reduced(
        self, loss: Any, gradients: Sequence[Any], params: Sequence[Any], weight: Any = None
    ) -> tuple[Any, list[Any], Any]:
        """What is still each replica's own over all of them, in one reduction: means, or, where replicas have weights
        that loss and gradients hold already, sums.

        Args:
            loss: float32 scalar.
            gradients: trees like `params` with None where there is none; summed in float32 at least.
            params: the parameters; those that vary over an axis are shards of one, whose gradient is whole already.
            weight: what this replica counts, float32 scalar, or None.
        """
        if not self.later:
            return loss, list(gradients), weight
        count = math.prod(_size(axis) for axis in self.later) if weight is None else 1
        structure: Any = jax.tree.structure(list(params))
        flat = structure.flatten_up_to(list(gradients))
        varied = [compat.varying(leaf) for leaf in jax.tree.leaves(list(params))]
        over = frozenset(self.later)
        shares = [_wide(loss) / count, weight, *(None if g is None else _wide(g) / count for g in flat)]
        summed = _summed(shares, [over, over, *(over - own for own in varied)])
        return summed[0], list(jax.tree.unflatten(structure, summed[2:])), summed[1]

    def totals(self, totals: Totals) -> Totals:
        """Those of all replicas, from this one's own."""
        count = math.prod(_size(axis) for axis in self.rows)
        axes = tuple(self.rows)
        own = [jnp.asarray(c, jnp.float32) for c in totals.counts]
        if self.checked:
            own = [compat.vary(c, [axis for axis in axes if axis not in compat.varying(c)]) for c in own]
        return Totals(_LAX.psum(own, axes) if axes else own, totals.parts * count)

    def keys(self, keys: Keys) -> Keys:
        """Random keys with the number of the replica in them."""
        return keys if not self.rows else {name: self._key(key) for name, key in keys.items()}

    def entering(self, running: Running) -> Running:
        """Running state as a pass gets it: the model's own random streams are this replica's."""
        if not self.rows:
            return running
        return running._replace(streams=jax.tree.map(lambda x: self._key(x) if is_key(x) else x, running.streams))

    def leaving(self, after: Running, given: Running, before: Running) -> Running:
        """Running state as a pass leaves it: the streams have moved on as far, and are the same on all replicas.

        Raises:
            UnsupportedError: a stream has another key.
        """
        if not self.rows:
            return after

        def one(new: Any, own: Any, old: Any) -> Any:
            if is_key(new) and new is not own:
                raise UnsupportedError(
                    "the model put another key into one of its random streams, and inside shard_map or pmap every "
                    "replica would have its own from now on. Let the streams draw (rngs.dropout()), or make new ones "
                    "outside of the step."
                )
            return old if is_key(new) else new

        return after._replace(streams=jax.tree.map(one, after.streams, given.streams, before.streams))

    def statistics(self, new: Any, old: Any) -> Any:
        """Running statistics as the mean over the replicas; integers, such as counts, are the largest.

        Args:
            new: each replica's own.
            old: those of the last step.
        """
        leaves, structure = jax.tree.flatten(new)
        before = jax.tree.leaves(old)
        over = [self._parted(after, prior) for after, prior in zip(leaves, before, strict=True)]
        shares = []
        for leaf, axes in zip(leaves, over, strict=True):
            if axes and not jnp.issubdtype(leaf.dtype, jnp.inexact):
                shares.append(_LAX.pmax(leaf.astype(jnp.int32), tuple(sorted(axes))).astype(leaf.dtype))
            else:
                shares.append(leaf / math.prod(_size(axis) for axis in axes) if axes else leaf)
        floats = [
            axes if jnp.issubdtype(leaf.dtype, jnp.inexact) else frozenset[Any]()
            for leaf, axes in zip(leaves, over, strict=True)
        ]
        return jax.tree.unflatten(structure, _summed(shares, floats))

    def _parted(self, after: Any, before: Any) -> frozenset[Any]:
        """Axes over which an array has become each replica's own."""
        if after is before or is_key(after):
            return frozenset()
        if self.checked:
            return compat.varying(after) - compat.varying(before)
        return frozenset(self.later)

    def _key(self, key: Any) -> Any:
        return jax.random.fold_in(key, jax.lax.axis_index(self.rows))


def replicas(what: str, axis_name: AxisName, batch: Any, params: Any, *, window: bool = False) -> Replicas | None:
    """The replicas around what is being traced; None outside of `shard_map` and `pmap`.

    Args:
        what: who asks, for errors.
        axis_name: the axes of replicas as the user named them.
        batch: what each replica has its own of.
        params: arrays that may be shards.
        window: whether gradients are to stay each replica's own until `Replicas.mean`.

    Raises:
        ArgumentError: `axis_name` names an axis that is not mapped here.
        UnsupportedError: it is needed.
    """
    mapped = compat.mapped_axes()
    named = () if axis_name is None else axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if unknown := [axis for axis in named if axis not in mapped]:
        here = ", ".join(map(repr, mapped)) or "none: this is not inside shard_map or pmap"
        raise ArgumentError(
            f"axis_name must be an axis of the shard_map or pmap around {what}, or several as a tuple. Mapped here: "
            f"{here}. Received: {', '.join(map(repr, unknown))}. "
            + ("" if mapped else "Under jax.jit the devices come from the arrays' shardings: leave axis_name out.")
        )
    if not mapped:
        return None
    if not is_checked(mapped):
        if set(named) != set(mapped):
            raise UnsupportedError(
                f"{what} inside pmap, or shard_map with check_vma=False, needs axis_name=: JAX does not say there over "
                f"which axes the batch is divided. Mapped here: {', '.join(map(repr, mapped))}; received: "
                f"{axis_name!r}. Write axis_name={mapped[0] if len(mapped) == 1 else mapped!r} where the parameters "
                "are the same on all of them; otherwise use shard_map with check_vma=True, which needs no name."
            )
        return Replicas(False, named, named)
    rows = _varied(batch)
    later = _in_order(mapped, {*rows, *_varied(params)}) if window else ()
    return Replicas(True, _in_order(mapped, rows), later)


def check_axis_name(axis_name: Any) -> None:
    """Refuse what is neither a name nor a tuple of names.

    Raises:
        ArgumentError: says what came.
    """
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if axis_name is not None and not (names and all(isinstance(name, str) for name in names)):
        raise ArgumentError(f"axis_name must be the name of an axis, or a tuple of names. Received: {axis_name!r}.")


def is_checked(mapped: Sequence[Any]) -> bool:
    """Whether the `shard_map` around checks how values vary."""
    return mapped[0] in compat.varying(jax.lax.axis_index(mapped[0]))


def check_whole(scattered: Sequence[bool], differentiated: Any) -> None:
    """Refuse shards of parameters where JAX does not say that they are some: their gradients would be averaged.

    Args:
        scattered: of each array, whether its gradient comes scattered out of the backward pass.
        differentiated: the arrays.

    Raises:
        UnsupportedError: says which.
    """
    if not any(scattered) or is_checked(compat.mapped_axes()):
        return
    paths = [path_name(path[2:]) or "params" for path, _ in jax.tree_util.tree_leaves_with_path(differentiated)]
    named = ", ".join(repr(path) for path, shard in zip(paths, scattered, strict=True) if shard)
    raise UnsupportedError(
        f"loss_fn gathers {named} from the replicas, so that each holds a shard of it. Inside pmap, or shard_map with "
        "check_vma=False, JAX does not say so, and the gradients of different shards would be averaged. Use shard_map "
        "with check_vma=True, or arrays with a NamedSharding under jax.jit."
    )


def averaged(value: Any, axes: Collection[Any]) -> Any:
    """The mean over some axes of the `shard_map` around; itself without any."""
    return _LAX.pmean(value, tuple(sorted(axes))) if axes else value


def _varied(tree: Any) -> set[Any]:
    return {axis for leaf in jax.tree.leaves(tree) for axis in compat.varying(leaf)}


def _in_order(mapped: Sequence[Any], axes: Collection[Any]) -> tuple[Any, ...]:
    return tuple(axis for axis in mapped if axis in axes)


def _size(axis: Any) -> int:
    size: int = _LAX.psum(1, axis)  # of a Python number this is the size of the axis, known while tracing
    return size


def _wide(leaf: Any) -> Any:
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))


def _summed(leaves: Sequence[Any], over: Sequence[frozenset[Any]]) -> list[Any]:
    """Each leaf summed over its own axes, those of equal axes together."""
    found = list(leaves)
    # in the order of the leaves: of a set's, processes would make different programs
    for axes in dict.fromkeys(each for leaf, each in zip(leaves, over, strict=True) if leaf is not None and each):
        numbers = [n for n, each in enumerate(over) if each == axes and leaves[n] is not None]
        sums = _LAX.psum([leaves[n] for n in numbers], tuple(sorted(axes)))
        for number, total in zip(numbers, sums, strict=True):
            found[number] = total
    return found

"""Replicas of a step inside `shard_map` or `pmap`: their axes, and the reductions over them (S9).

In a `shard_map` that checks how values vary (`check_vma=True`, the default), JAX itself sums the gradient of a value
that is the same on all replicas. The loss is therefore averaged over the axes on which it varies *before* it is
differentiated. The gradients are then those of the mean, also for parameters that the user shards. Averaging the
gradients after `jax.grad` instead would leave the sum.

Without the checks, and in `pmap`, JAX does not sum and raises no error: each replica's gradients are averaged over
`axis_name`. The same is done in a window of micro-batches (S8), with the parameters made to vary, so that replicas
sum once at its end. `vmap` does not create replicas, whatever its axis name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from polyamp.errors import ArgumentError, UnsupportedError
from polyamp.rules.loss_weights import TermTotals
from polyamp_jax import compat
from polyamp_jax.arrays import is_key, path_name
from polyamp_jax.distributed.all_reduce import all_reduce_sum, average_over_axes, axis_size
from polyamp_jax.models.running_state import RandomKeys, RunningState

AxisName = str | tuple[str, ...] | None
"""Type of the argument `axis_name=`."""
_LAX: Final[Any] = jax.lax  # JAX does not annotate its collectives


@dataclasses.dataclass(frozen=True)
class ShardMapReplicas:
    """Replicas of the current trace.

    Attributes:
        has_check: whether JAX tracks how values vary over the replicas.
        batch_axes: axes over which the batch is divided; the replicas along them draw different random masks.
        local_axes: axes over which gradients stay per replica until `reduce_gradients`; over all others JAX has summed
            them.
    """

    has_check: bool
    batch_axes: tuple[Any, ...]
    local_axes: tuple[Any, ...]

    def mark_varying(self, tree: Any) -> Any:
        """Mark arrays as varying per replica, so that JAX does not sum the gradients with respect to them."""
        return jax.tree.map(self._mark_leaf, tree)

    def _mark_leaf(self, leaf: Any) -> Any:
        if not self.has_check or is_key(leaf):
            return leaf
        missing = [axis for axis in self.local_axes if axis not in compat.varying_axes(leaf)]
        return compat.vary_over_axes(leaf, missing) if missing else leaf

    def loss(self, loss: Any, weight: Any = None) -> tuple[Any, Any]:
        """Return the loss to differentiate and the summed weight of the replicas, or None (S9).

        The loss is the mean over the axes on which it varies, except those of `local_axes`. The weights are summed in
        the same reduction.
        """
        axes = compat.varying_axes(loss) - set(self.local_axes)
        if weight is None:
            return self._mark_leaf(average_over_axes(loss, axes)), None
        axes |= compat.varying_axes(weight) - set(self.local_axes)
        if axes:
            pair = [
                compat.vary_over_axes(part, sorted(axes - compat.varying_axes(part)))
                for part in (loss * weight, weight)
            ]
            total, weight = _LAX.psum(pair, tuple(sorted(axes)))
            loss = total / jnp.where(weight > 0.0, weight, 1.0)
        return self._mark_leaf(loss), self._mark_leaf(weight)

    def reduce_gradients(
        self, loss: Any, gradients: Sequence[Any], params: Sequence[Any], weight: Any = None
    ) -> tuple[Any, list[Any], Any]:
        """Reduce loss, gradients and weight over the axes of `local_axes`, in one reduction.

        These are means; if the loss and gradients are already multiplied by the replicas' weights, sums.

        Args:
            loss: float32 scalar.
            gradients: trees like `params`, None for a parameter without a gradient; summed in float32 at least.
            params: the parameters; one that varies over an axis is a shard, whose gradient is already complete.
            weight: the weight of this replica, float32 scalar, or None.
        """
        if not self.local_axes:
            return loss, list(gradients), weight
        count = math.prod(axis_size(axis) for axis in self.local_axes) if weight is None else 1
        structure: Any = jax.tree.structure(list(params))
        flat = structure.flatten_up_to(list(gradients))
        varied = [compat.varying_axes(leaf) for leaf in jax.tree.leaves(list(params))]
        over = frozenset(self.local_axes)
        shares = [_widen_leaf(loss) / count, weight, *(None if g is None else _widen_leaf(g) / count for g in flat)]
        summed = all_reduce_sum(shares, [over, over, *(over - own for own in varied)])
        return summed[0], list(jax.tree.unflatten(structure, summed[2:])), summed[1]

    def totals(self, totals: TermTotals) -> TermTotals:
        """Return the totals of all replicas from those of this replica."""
        count = math.prod(axis_size(axis) for axis in self.batch_axes)
        axes = tuple(self.batch_axes)
        own = [jnp.asarray(c, jnp.float32) for c in totals.counts]
        if self.has_check:
            own = [compat.vary_over_axes(c, [axis for axis in axes if axis not in compat.varying_axes(c)]) for c in own]
        return TermTotals(_LAX.psum(own, axes) if axes else own, totals.parts * count)

    def keys(self, keys: RandomKeys) -> RandomKeys:
        """Return random keys with the index of the replica folded in."""
        return keys if not self.batch_axes else {name: self._key(key) for name, key in keys.items()}

    def enter_pass(self, running: RunningState) -> RunningState:
        """Return the running state for a pass, with the model's own random streams specific to this replica."""
        if not self.batch_axes:
            return running
        return running._replace(streams=jax.tree.map(lambda x: self._key(x) if is_key(x) else x, running.streams))

    def leave_pass(self, after: RunningState, given: RunningState, before: RunningState) -> RunningState:
        """Return the running state after a pass, with advanced streams that are the same on all replicas again.

        Raises:
            UnsupportedError: the pass replaced the key of a stream.
        """
        if not self.batch_axes:
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
        """Return the mean of the running statistics over the replicas; for integers, such as counts, the maximum.

        Args:
            new: the statistics of this replica.
            old: the statistics of the last step.
        """
        leaves, structure = jax.tree.flatten(new)
        before = jax.tree.leaves(old)
        over = [self._diverged_axes(after, prior) for after, prior in zip(leaves, before, strict=True)]
        shares = []
        for leaf, axes in zip(leaves, over, strict=True):
            if axes and not jnp.issubdtype(leaf.dtype, jnp.inexact):
                shares.append(_LAX.pmax(leaf.astype(jnp.int32), tuple(sorted(axes))).astype(leaf.dtype))
            else:
                shares.append(leaf / math.prod(axis_size(axis) for axis in axes) if axes else leaf)
        floats = [
            axes if jnp.issubdtype(leaf.dtype, jnp.inexact) else frozenset[Any]()
            for leaf, axes in zip(leaves, over, strict=True)
        ]
        return jax.tree.unflatten(structure, all_reduce_sum(shares, floats))

    def _diverged_axes(self, after: Any, before: Any) -> frozenset[Any]:
        """Return the axes over which an array has come to differ between replicas."""
        if after is before or is_key(after):
            return frozenset()
        if self.has_check:
            return compat.varying_axes(after) - compat.varying_axes(before)
        return frozenset(self.local_axes)

    def _key(self, key: Any) -> Any:
        return jax.random.fold_in(key, jax.lax.axis_index(self.batch_axes))


def find_replicas(
    what: str, axis_name: AxisName, batch: Any, params: Any, *, window: bool = False
) -> ShardMapReplicas | None:
    """Return the replicas of the current trace, or None outside of `shard_map` and `pmap`.

    Args:
        what: name of the calling function, for errors.
        axis_name: the axes of replicas as named by the user.
        batch: the batch, which differs between replicas.
        params: arrays that may be shards.
        window: whether gradients stay per replica until `ShardMapReplicas.reduce_gradients`.

    Raises:
        ArgumentError: `axis_name` names an axis that is not mapped here.
        UnsupportedError: `axis_name` is needed but missing.
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
    if not has_varying_check(mapped):
        if set(named) != set(mapped):
            raise UnsupportedError(
                f"{what} inside pmap, or shard_map with check_vma=False, needs axis_name=: JAX does not say there over "
                f"which axes the batch is divided. Mapped here: {', '.join(map(repr, mapped))}; received: "
                f"{axis_name!r}. Write axis_name={mapped[0] if len(mapped) == 1 else mapped!r} where the parameters "
                "are the same on all of them; otherwise use shard_map with check_vma=True, which needs no name."
            )
        return ShardMapReplicas(False, named, named)
    rows = _varying_axis_names(batch)
    local_axes = _sort_axes(mapped, {*rows, *_varying_axis_names(params)}) if window else ()
    return ShardMapReplicas(True, _sort_axes(mapped, rows), local_axes)


def check_axis_name(axis_name: Any) -> None:
    """Reject a value that is neither a name nor a tuple of names.

    Raises:
        ArgumentError: names the received value.
    """
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if axis_name is not None and not (names and all(isinstance(name, str) for name in names)):
        raise ArgumentError(f"axis_name must be the name of an axis, or a tuple of names. Received: {axis_name!r}.")


def has_varying_check(mapped: Sequence[Any]) -> bool:
    """Return whether the enclosing `shard_map` checks how values vary."""
    return mapped[0] in compat.varying_axes(jax.lax.axis_index(mapped[0]))


def check_known_shards(scattered: Sequence[bool], differentiated: Any) -> None:
    """Reject sharded parameters if JAX does not track them as shards: their gradients would be averaged.

    Args:
        scattered: for each array, whether the backward pass returns its gradient scattered.
        differentiated: the arrays.

    Raises:
        UnsupportedError: names the arrays.
    """
    if not any(scattered) or has_varying_check(compat.mapped_axes()):
        return
    paths = [path_name(path[2:]) or "params" for path, _ in jax.tree_util.tree_leaves_with_path(differentiated)]
    named = ", ".join(repr(path) for path, shard in zip(paths, scattered, strict=True) if shard)
    raise UnsupportedError(
        f"loss_fn gathers {named} from the replicas, so that each holds a shard of it. Inside pmap, or shard_map with "
        "check_vma=False, JAX does not say so, and the gradients of different shards would be averaged. Use shard_map "
        "with check_vma=True, or arrays with a NamedSharding under jax.jit."
    )


def _varying_axis_names(tree: Any) -> set[Any]:
    return {axis for leaf in jax.tree.leaves(tree) for axis in compat.varying_axes(leaf)}


def _sort_axes(mapped: Sequence[Any], axes: Collection[Any]) -> tuple[Any, ...]:
    return tuple(axis for axis in mapped if axis in axes)


def _widen_leaf(leaf: Any) -> Any:
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))

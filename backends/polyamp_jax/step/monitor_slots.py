"""`update_slots`: what a step collects for a monitor, in JAX (S35). All of it is traceable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from polyamp.monitor.slots import EXPONENT_FIELDS, MonitorSelection, MonitorSlots, collect_slots
from polyamp_jax import compat
from polyamp_jax.arrays import named_leaves
from polyamp_jax.step.optimizers import leaves_like
from polyamp_jax.step.state import JaxState


class JaxSlots:
    """`SlotFunctions` for JAX. Shards of a `shard_map` are added up; XLA does so itself for sharded arrays."""

    def exponent_counts(self, name: str, array: jax.Array) -> jax.Array:
        """Return how many elements have each exponent field."""
        bits = jax.lax.bitcast_convert_type(jnp.ravel(_real(array)).astype(jnp.float32), jnp.int32)
        fields = (bits >> 23) & (EXPONENT_FIELDS - 1)
        return _over_shards(jnp.bincount(fields, length=EXPONENT_FIELDS).astype(jnp.int32), array)

    def squares(self, name: str, array: jax.Array) -> jax.Array:
        """Return the sum of squares."""
        return _over_shards(jnp.sum(jnp.square(_real(array).astype(jnp.float32))), array)

    def stack(self, values: Sequence[Any]) -> jax.Array:
        """Stack arrays."""
        return jnp.stack(values)

    def square_root(self, values: jax.Array) -> jax.Array:
        """Return the square root."""
        return jnp.sqrt(values)


_FUNCTIONS: Final = JaxSlots()


def update_slots(selection: MonitorSelection, old: JaxState, new: JaxState, values: Any) -> MonitorSlots:
    """Return the figures of an update.

    Args:
        selection: what is collected; in attempts whose number is no multiple of `every`, nothing is.
        old, new: the state around the update.
        values: the unscaled gradients, before clipping.
    """
    before, after = named_leaves(old.params), named_leaves(new.params)
    named = dict(zip(before, leaves_like(values, old.params), strict=True))
    gradients = {name: grad for name, grad in named.items() if grad is not None}
    scale, one = old.scale_state.scale, jnp.ones((), jnp.float32)

    def collect(_: None) -> MonitorSlots:
        return collect_slots(
            selection, _FUNCTIONS, gradients, before, after, read=jnp.ones((), bool), scale=scale, carried=one
        )

    if selection.every == 1:
        return collect(None)
    due = (old.attempts + 1) % selection.every == 0
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(collect, None))
    empty = empty._replace(scale=scale, carried=one)
    made: MonitorSlots = jax.lax.cond(due, collect, lambda _: empty, None)
    return made


def _real(array: Any) -> Any:
    """Return complex numbers as pairs of real ones."""
    return jnp.stack([array.real, array.imag]) if jnp.iscomplexobj(array) else array


def _over_shards(part: jax.Array, array: Any) -> jax.Array:
    axes = compat.varying_axes(array)
    lax: Any = jax.lax  # JAX does not annotate its collectives
    whole: jax.Array = lax.psum(part, tuple(sorted(axes))) if axes else part
    return whole

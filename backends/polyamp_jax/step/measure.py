"""What is measured of gradients before anything is decided: their norm and the finite flag (S10, S11), in float32.

Gradients are unscaled here too (S7), and fitted to the parameters that they are for. Called by `differentiate`,
`update`, `backend` and `own_loop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from polyamp.errors import GradientError
from polyamp.results import Gradients
from polyamp.rules import refusals
from polyamp_jax import compat
from polyamp_jax.arrays import dtype_name, named_leaves, path_name
from polyamp_jax.step.layouts import spread
from polyamp_jax.step.optimizers import like
from polyamp_jax.step.state import JaxState

_SMALL: Final = 2**14  # elements; on a 2-core CPU a pass of its own costs more than copying so few


def norm_and_finite(leaves: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
    """Global L2 norm and finite flag (S10, S11) of float32 gradients, over the whole range of float32; of float64 ones
    the norm is float64.

    A sum of squares overflows from 2^64 on and loses what is below 2^-63: there a sum over gradients times a power of
    two stands in. An accelerator makes all the sums in one pass (`_three_sums`). XLA's CPU backend gives every sum its
    own pass, so there a second one, with the power that the first asks for, is quicker (`_two_sums`). Measurements and
    the compiled programs: `docs/measurements/jax_loss_scaling.md`.

    Inside `shard_map` a gradient that varies over its axes is a shard, and the norm is that of all of them: one
    all-reduce of four numbers, for norm and flag together. Where XLA divides the work by itself and nobody says how,
    the sums are made in one pass on a CPU too, so that they are reduced together, and no gradients are laid end to end,
    for which shards would be gathered.
    """
    groups: dict[frozenset[Any], list[Any]] = {}
    for leaf in leaves:
        groups.setdefault(compat.varying(leaf), []).append(leaf)
    over = sorted({axis for axes in groups for axis in axes})
    if not over:
        return _local(list(leaves))
    zeros = jnp.zeros(4, jnp.result_type(jnp.float32, *leaves))
    whole, mine = zeros, compat.vary(zeros, over)
    for axes, shards in groups.items():
        part = _in_ranges(*_local(shards))
        if axes:
            mine += _once(part, [axis for axis in over if axis not in axes])
        else:
            whole += part
    lax: Any = jax.lax  # JAX does not annotate its collectives
    return _of_ranges(lax.psum(mine, tuple(over)) + whole)


def norm_and_finite_of(state: JaxState, values: Any) -> tuple[jax.Array, jax.Array]:
    """The same of a state's gradients, shard by shard where the state's layout is known.

    Raises:
        GradientError: a gradient differs between replicas that have one parameter together.
    """
    leaves = like(values, state.params)
    for (path, param), grad in zip(jax.tree_util.tree_leaves_with_path(state.params), leaves, strict=True):
        if grad is not None and (parted := compat.varying(grad) - compat.varying(param)):
            named = ", ".join(map(repr, sorted(parted)))
            raise GradientError(
                f"the gradient of {path_name(path)!r} varies over {named}, and the parameter does not: replicas would "
                f"part. Average it: jax.lax.pmean(gradient, {named})."
            )
    found = None if state.layout is None else state.layout.by_shards(norm_and_finite, leaves)
    if found is not None:
        norm, finite = found
        return norm, finite
    return norm_and_finite([leaf for leaf in leaves if leaf is not None])


def _local(leaves: list[Any]) -> tuple[jax.Array, jax.Array]:
    if any(map(spread, leaves)):
        return _three_sums(leaves)
    norm, finite = jax.lax.platform_dependent(leaves, cpu=_two_sums, default=_three_sums)
    return norm, finite


def _in_ranges(norm: jax.Array, finite: jax.Array) -> jax.Array:
    """A norm and a flag as numbers to be added to those of other shards, shape (4,): the three squares of
    `_three_sums`, and 1 where something is not finite."""
    enlarged = jnp.square(jnp.minimum(norm * 2.0**63, 2.0**40))
    shrunk = jnp.square(jnp.maximum(norm * 2.0**-80, 2.0**-60))
    return jnp.stack([jnp.square(norm), enlarged, shrunk, 1.0 - finite.astype(norm.dtype)])


def _of_ranges(sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    plain, enlarged, shrunk, bad = sums
    return _norm(plain, enlarged, shrunk), bad == 0.0


def _once(part: jax.Array, axes: Sequence[Any]) -> jax.Array:
    """What is the same along some axes, in one place of them only, so that it is counted once."""
    for axis in axes:
        part = jnp.where(jax.lax.axis_index(axis) == 0, part, 0.0)
    return part


def _two_sums(leaves: list[Any]) -> tuple[jax.Array, jax.Array]:
    """The first sum picks a power of two for the second, which is finite exactly when every gradient is.

    Sums carry NaN on, a maximum under XLA does not. (Scaling by max |g| takes twice as long on a CPU, where maxima are
    not vectorised.) The power has to depend on the data: with a constant c, XLA turns (g * c) * (g * c) into
    (g * g) * (c * c), and c * c into 0 or inf. Small gradients are laid end to end, or the calls cost more than the
    sums.
    """
    parts = [g for g in leaves if g.size >= _SMALL]
    small = [jnp.ravel(g) for g in leaves if g.size < _SMALL]
    parts += [jnp.concatenate(small)] if small else []

    def squares(factor: Any) -> jax.Array:
        return _total([jnp.square(g * jnp.asarray(factor, g.dtype)) for g in parts])

    plain = squares(1.0)
    shrinking = jnp.where(jnp.isfinite(plain), 1.0, 2.0**-80)
    factor = jnp.where(plain < 2.0**-60, 2.0**63, shrinking)
    # the flag of the root, not of the sum: XLA would copy the chain of additions into every select on the flag
    root = jnp.sqrt(squares(factor))
    return (root / factor).astype(root.dtype), jnp.isfinite(root)


def _three_sums(leaves: list[Any]) -> tuple[jax.Array, jax.Array]:
    """Sums of squares of the gradients, of the gradients times 2^63 and times 2^-80; then the one in range.

    They do not depend on one another, so XLA makes them in one multi-output pass. The bounds change no sum that is
    used. They keep the sum of the enlarged finite, and they keep XLA from multiplying the constants out of the
    squares, as above. NaN shows in the plain sum, whatever becomes of it at a bound.
    """
    plain = _total([jnp.square(g) for g in leaves])
    enlarged = _total([jnp.square(jnp.minimum(jnp.abs(g * 2.0**63), 2.0**40)) for g in leaves])
    shrunk = _total([jnp.square(jnp.maximum(jnp.abs(g * 2.0**-80), 2.0**-60)) for g in leaves])
    return _norm(plain, enlarged, shrunk), jnp.isfinite(shrunk) & ~jnp.isnan(plain)


def _norm(plain: jax.Array, enlarged: jax.Array, shrunk: jax.Array) -> jax.Array:
    inner = jnp.where(plain < 2.0**-60, jnp.sqrt(enlarged) * 2.0**-63, jnp.sqrt(plain))
    return jnp.where(jnp.isinf(plain), jnp.sqrt(shrunk) * 2.0**80, inner)


def _total(arrays: Sequence[Any]) -> jax.Array:
    return jnp.stack([jnp.sum(array) for array in arrays]).sum()


def unscaled_leaf(leaf: Any, scale: Any | None, dtype: Any = jnp.float32) -> jax.Array:
    """A gradient in float32, divided by the scale (S7); converted first, or small quotients would be lost."""
    wide: jax.Array = leaf.astype(dtype)
    return wide if scale is None else wide / scale.astype(dtype)


def fitted(state: JaxState, grads: Gradients) -> Any:
    """Gradients as `apply_gradients` got them, in the parameters' structure, at least float32.

    Raises:
        GradientError: they do not fit the parameters.
    """
    params, received = named_leaves(state.params), {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads.values, is_leaf=lambda x: x is None):
        name = path_name(path)
        if leaf is not None or name in params:  # equinox keeps None where a module has no such parameter
            received[name] = leaf
    refusals.check_gradients(
        [(name, jnp.shape(leaf)) for name, leaf in params.items()],
        [(name, None if leaf is None else jnp.shape(leaf)) for name, leaf in received.items()],
    )
    for name, leaf in received.items():
        if leaf is not None and dtype_name(leaf) not in refusals.FLOATING:
            raise GradientError(f"the gradient of {name!r} must be a floating array. Received: {dtype_name(leaf)}.")
    leaves = [
        None if (grad := received[name]) is None
        else unscaled_leaf(jnp.asarray(grad), None, jnp.promote_types(leaf.dtype, jnp.float32))
        for name, leaf in params.items()
    ]  # fmt: skip
    return jax.tree.unflatten(jax.tree.structure(state.params), leaves)

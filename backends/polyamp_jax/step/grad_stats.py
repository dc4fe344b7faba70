"""Global norm and finite flag of the gradients (S10, S11), in float32.

This module also unscales gradients (S7) and fits them to the structure of their parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from polyamp.errors import GradientError
from polyamp.float_formats import FLOAT_DTYPES
from polyamp.results import Gradients
from polyamp.rules import step_checks
from polyamp_jax import compat
from polyamp_jax.arrays import dtype_name, named_leaves, path_name
from polyamp_jax.distributed.jax_only.sharding_layout import is_auto_sharded
from polyamp_jax.step.optimizers import leaves_like
from polyamp_jax.step.state import JaxState

_SMALL_SIZE: Final = 2**14  # elements; on a 2-core CPU a separate pass costs more than copying so few
_LOWEST: Final = 2.0**-60
"""A sum of squares below it may have lost squares that are too small for float32."""


def global_norm_and_finite(leaves: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
    """Return the global L2 norm and the finite flag (S10, S11) of the gradients.

    The norm is correct over the whole range of float32. For float64 gradients the norm is float64.

    A sum of squares overflows from 2^64 on and loses values below 2^-63. There a sum over gradients times a power of
    two replaces it. An accelerator computes all sums in one pass (`_three_sums`). XLA's CPU backend runs a separate
    pass for every sum. There the other sums are computed only if the first is out of range (`_one_sum`).
    Measurements and the compiled programs: `docs/measurements/jax_loss_scaling.md`.

    Inside `shard_map` a gradient that varies over its axes is a shard, and the norm is that of all shards: one
    all-reduce of four numbers, for norm and flag together. If XLA partitions the work in an unknown way, a CPU uses
    one pass too, so that the sums are reduced together. Gradients are then not concatenated, which would gather shards.
    """
    groups: dict[frozenset[Any], list[Any]] = {}
    for leaf in leaves:
        groups.setdefault(compat.varying_axes(leaf), []).append(leaf)
    over = sorted({axis for axes in groups for axis in axes})
    if not over:
        return _local_norm_and_finite(list(leaves))
    zeros = jnp.zeros(4, jnp.result_type(jnp.float32, *leaves))
    whole, mine = zeros, compat.vary_over_axes(zeros, over)
    for axes, shards in groups.items():
        part = _to_range_sums(*_local_norm_and_finite(shards))
        if axes:
            mine += _count_once(part, [axis for axis in over if axis not in axes])
        else:
            whole += part
    lax: Any = jax.lax  # JAX does not annotate its collectives
    return _from_range_sums(lax.psum(mine, tuple(over)) + whole)


def sharded_norm_and_finite(state: JaxState, values: Any) -> tuple[jax.Array, jax.Array]:
    """Return norm and finite flag of a state's gradients, shard by shard if the state's layout is known.

    Raises:
        GradientError: a gradient differs between replicas that share its parameter.
    """
    leaves = leaves_like(values, state.params)
    for (path, param), grad in zip(jax.tree_util.tree_leaves_with_path(state.params), leaves, strict=True):
        if grad is not None and (parted := compat.varying_axes(grad) - compat.varying_axes(param)):
            named = ", ".join(map(repr, sorted(parted)))
            raise GradientError(
                f"the gradient of {path_name(path)!r} varies over {named}, and the parameter does not: replicas would "
                f"part. Average it: jax.lax.pmean(gradient, {named})."
            )
    found = None if state.layout is None else state.layout.map_shards(global_norm_and_finite, leaves)
    if found is not None:
        norm, finite = found
        return norm, finite
    return global_norm_and_finite([leaf for leaf in leaves if leaf is not None])


def _local_norm_and_finite(leaves: list[Any]) -> tuple[jax.Array, jax.Array]:
    if any(map(is_auto_sharded, leaves)):
        return _three_sums(leaves)
    norm, finite = jax.lax.platform_dependent(leaves, cpu=_one_sum, default=_three_sums)
    return norm, finite


def _to_range_sums(norm: jax.Array, finite: jax.Array) -> jax.Array:
    """Convert a norm and a flag to an array of shape (4,) that can be added to those of other shards.

    It contains the three squares of `_three_sums`, and 1 if a gradient is not finite, else 0.
    """
    enlarged = jnp.square(jnp.minimum(norm * 2.0**63, 2.0**40))
    shrunk = jnp.square(jnp.maximum(norm * 2.0**-80, 2.0**-60))
    return jnp.stack([jnp.square(norm), enlarged, shrunk, 1.0 - finite.astype(norm.dtype)])


def _from_range_sums(sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    plain, enlarged, shrunk, bad = sums
    return _norm_in_range(plain, enlarged, shrunk), bad == 0.0


def _count_once(part: jax.Array, axes: Sequence[Any]) -> jax.Array:
    """Zero a value that is the same along `axes` everywhere except at index 0, so that it is counted once."""
    for axis in axes:
        part = jnp.where(jax.lax.axis_index(axis) == 0, part, 0.0)
    return part


def _one_sum(leaves: list[Any]) -> tuple[jax.Array, jax.Array]:
    """Return norm and finite flag from one sum of squares, and from two further ones if that one is out of range.

    Small gradients are concatenated; otherwise the calls would cost more than the sums. The conditional is for a CPU
    only: a GPU's host would wait for the flag (S10). Its result is the norm, not the sum: XLA would otherwise copy the
    chain of additions into every select on the flag.
    """
    parts = [g for g in leaves if g.size >= _SMALL_SIZE]
    small = [jnp.ravel(g) for g in leaves if g.size < _SMALL_SIZE]
    parts += [jnp.concatenate(small)] if small else []
    plain = _add([_sum_of_squares(g) for g in parts])
    norm, finite = jax.lax.cond(
        (plain >= _LOWEST) & jnp.isfinite(plain),
        lambda _: (jnp.sqrt(plain), jnp.isfinite(plain)),
        lambda parts: _three_sums(parts, plain),
        parts,
    )
    return norm, finite


def _three_sums(leaves: list[Any], plain: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Return norm and finite flag from three sums of squares: of g, g * 2^63 and g * 2^-80. Uses the one in range.

    The sums do not depend on one another, so XLA computes them in one multi-output pass. The bounds change no sum that
    is used. They keep the enlarged sum finite and prevent XLA from factoring the constants out of the squares: it turns
    (g * c) * (g * c) into (g * g) * (c * c), and c * c into 0 or inf. NaN is detected in the plain sum, even if a bound
    removes it elsewhere: a sum propagates NaN, a maximum under XLA does not.

    Args:
        leaves: the gradients.
        plain: the first sum, if it is known.
    """
    plain = _add([_sum_of_squares(g) for g in leaves]) if plain is None else plain
    enlarged = _add([_enlarged_sum(g) for g in leaves])
    shrunk = _add([_shrunk_sum(g) for g in leaves])
    return _norm_in_range(plain, enlarged, shrunk), jnp.isfinite(shrunk) & ~jnp.isnan(plain)


def _norm_in_range(plain: jax.Array, enlarged: jax.Array, shrunk: jax.Array) -> jax.Array:
    inner = jnp.where(plain < _LOWEST, jnp.sqrt(enlarged) * 2.0**-63, jnp.sqrt(plain))
    return jnp.where(jnp.isinf(plain), jnp.sqrt(shrunk) * 2.0**80, inner)


def _add(sums: Sequence[Any]) -> jax.Array:
    return jnp.stack(sums).sum()


@functools.partial(jax.jit, inline=True)  # traced once for all gradients of one shape
def _sum_of_squares(grad: Any) -> jax.Array:
    return jnp.sum(jnp.square(grad))


@functools.partial(jax.jit, inline=True)
def _enlarged_sum(grad: Any) -> jax.Array:
    return jnp.sum(jnp.square(jnp.minimum(jnp.abs(grad * 2.0**63), 2.0**40)))


@functools.partial(jax.jit, inline=True)
def _shrunk_sum(grad: Any) -> jax.Array:
    return jnp.sum(jnp.square(jnp.maximum(jnp.abs(grad * 2.0**-80), 2.0**-60)))


def unscale_leaf(leaf: Any, scale: Any | None, dtype: Any = jnp.float32) -> jax.Array:
    """Cast a gradient to `dtype` and divide it by the scale (S7). Dividing first would lose small quotients."""
    wide: jax.Array = leaf.astype(dtype)
    return wide if scale is None else wide / scale.astype(dtype)


def fit_gradients(state: JaxState, grads: Gradients) -> Any:
    """Return the gradients given to `apply_gradients` in the parameters' structure, in at least float32.

    Raises:
        GradientError: the gradients do not fit the parameters.
    """
    params, received = named_leaves(state.params), {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads.values, is_leaf=lambda x: x is None):
        name = path_name(path)
        if leaf is not None or name in params:  # equinox uses None if a module has no such parameter
            received[name] = leaf
    step_checks.check_gradients(
        [(name, jnp.shape(leaf)) for name, leaf in params.items()],
        [(name, None if leaf is None else jnp.shape(leaf)) for name, leaf in received.items()],
    )
    for name, leaf in received.items():
        if leaf is not None and dtype_name(leaf) not in FLOAT_DTYPES:
            raise GradientError(f"the gradient of {name!r} must be a floating array. Received: {dtype_name(leaf)}.")
    leaves = [
        None if (grad := received[name]) is None
        else unscale_leaf(jnp.asarray(grad), None, jnp.promote_types(leaf.dtype, jnp.float32))
        for name, leaf in params.items()
    ]  # fmt: skip
    return jax.tree.unflatten(jax.tree.structure(state.params), leaves)

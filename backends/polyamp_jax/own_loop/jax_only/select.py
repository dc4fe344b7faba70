"""`select`: conditional update for custom training loops, by the finite flag."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from polyamp.errors import ArgumentError, describe_value
from polyamp_jax import compat
from polyamp_jax.arrays import is_array, is_key


def select(finite: Any, new: Any, old: Any) -> Any:
    """Return `new` if `finite`, else `old`, bit for bit, so that a step that overflows changes nothing (S12).

    Both are computed and selected elementwise, as by `jnp.where`: there is no branch, and the host does not wait.

    Args:
        finite: the flag of `scaled_value_and_grad` or `scaler.unscale`, a boolean scalar.
        new: any pytree after the update: parameters, an optax state, an equinox module, an `nnx.State`, `(parameters,
            state)`. For nnx modules and optimizers pass the objects themselves: they are changed in place, as by an
            update.
        old: the same before the update, and for nnx before the forward pass: `nnx.clone((model, optimizer))`.

    Returns:
        The selected pytree; for nnx objects `new` itself. Typed PRNG keys and nnx's random streams always come from
        `new`; otherwise the dropout mask that overflowed would repeat. Leaves that are not arrays must be equal.

    Raises:
        ArgumentError: `finite` is not a boolean scalar; `new` and `old` differ in structure, shape, dtype or in a leaf
            that is not an array; `old` is not a copy, but shares its nnx variables with `new`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> params, optimizer = {"w": jnp.ones(2)}, optax.adam(0.1)
        >>> opt_state, grads = optimizer.init(params), {"w": jnp.array([jnp.inf, 1.0])}
        >>> updates, new_opt_state = optimizer.update(grads, opt_state, params)
        >>> new = (optax.apply_updates(params, updates), new_opt_state)
        >>> params, opt_state = select(jnp.isfinite(grads["w"]).all(), new, (params, opt_state))
        >>> params["w"].tolist(), int(opt_state[0].count)
        ([1.0, 1.0], 0)
    """
    if not isinstance(finite, bool) and not (is_array(finite) and finite.shape == () and finite.dtype == bool):
        raise ArgumentError(
            "select(finite, new, old): finite must be a boolean scalar, the flag that scaled_value_and_grad returned. "
            f"Received: {describe_value(finite)}. Are the arguments swapped?"
        )
    kinds = compat.nnx_container_classes()
    if any(isinstance(leaf, kinds) for leaf in jax.tree.leaves(new, is_leaf=lambda node: isinstance(node, kinds))):
        return _select_in_place(finite, new, old)
    _check_structure(new, old)
    streams = compat.nnx_stream_classes()

    def choose(path: Any, a: Any, b: Any) -> Any:
        return a if isinstance(a, streams) else _select_leaf(finite, a, b, path)

    return jax.tree_util.tree_map_with_path(choose, new, old, is_leaf=lambda node: isinstance(node, streams))


def _select_in_place(finite: Any, new: Any, old: Any) -> Any:
    """Update the nnx objects in `new` in place; their random streams are not reset."""
    nnx = compat.loaded_module("flax.nnx")
    after, before = nnx.state(new, nnx.Not(nnx.RngState)), nnx.state(old, nnx.Not(nnx.RngState))
    variables = [_nnx_variables(tree, nnx.Variable) for tree in (new, old)]
    if {id(variable) for variable in variables[0]} & {id(variable) for variable in variables[1]}:
        raise ArgumentError(
            "select(finite, new, old): old shares its variables with new, so that the update changed both. Copy it "
            "before the forward pass: old = nnx.clone((model, optimizer)), or jax.tree.map(lambda x: x, "
            "nnx.state(model))."
        )
    values = nnx.to_pure_dict(after), nnx.to_pure_dict(before)
    _check_structure(*values)
    chosen = jax.tree_util.tree_map_with_path(lambda path, a, b: _select_leaf(finite, a, b, path), *values)
    nnx.update(new, chosen)
    return new


def _nnx_variables(tree: Any, kind: Any) -> list[Any]:
    nnx = compat.loaded_module("flax.nnx")
    leaves: list[Any] = jax.tree.leaves(nnx.state(tree), is_leaf=lambda node: isinstance(node, kind))
    return leaves


def _check_structure(new: Any, old: Any) -> None:
    structures: list[Any] = [jax.tree.structure(tree) for tree in (new, old)]
    if structures[0] != structures[1]:
        raise ArgumentError(
            "select(finite, new, old): new and old must be of one structure. Received: "
            f"new {structures[0]} and old {structures[1]}."
        )


def _select_leaf(finite: Any, new: Any, old: Any, path: Any) -> Any:
    if new is old or is_key(new):
        return new
    if is_array(new) and is_array(old):
        if new.shape == old.shape and new.dtype == old.dtype:
            return jnp.where(finite, new, old)
        raise ArgumentError(
            f"select(finite, new, old): new{jax.tree_util.keystr(path)} is {new.dtype}{list(new.shape)} and old is "
            f"{old.dtype}{list(old.shape)}; both must have one shape and dtype."
        )
    if not is_array(new) and not is_array(old) and type(new) is type(old) and new == old:
        return new
    raise ArgumentError(
        f"select(finite, new, old): new{jax.tree_util.keystr(path)} is {describe_value(new)} and old is "
        f"{describe_value(old)}. "
        "Only arrays can be chosen by a flag on the device: make it a jnp array, or leave it out."
    )

"""Moving averages of a state's parameters: their arrays, their move after an update, the model with them (S34).

The states are `JaxState`s, annotated as `Any` because `state` imports this module.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp

from polyamp.recipe.recipe import Recipe
from polyamp.rules.averages import average_share, move_average
from polyamp_jax.arrays import XP, copy_arrays, named_leaves

Averages = dict[str, dict[str, jax.Array]]
"""Role, "model" or "running" -> path -> average; empty without `Recipe(ema=...)`."""


def averaged_values(params: Any, statistics: Any, names: Collection[str], recipe: Recipe) -> Averages:
    """Return what is averaged, in the averages' dtype: new averages are these.

    Args:
        params: the parameters.
        statistics: the running statistics.
        names: paths of the parameters that have an average.
        recipe: the recipe.
    """
    ema = recipe.ema
    if ema is None:
        return {}
    wide = jnp.float64 if recipe.policy.param == "float64" else jnp.float32
    running = named_leaves(statistics) if ema.statistics == "average" else {}
    return {
        "model": {name: _widen(leaf, wide) for name, leaf in named_leaves(params).items() if name in names},
        "running": {n: _widen(leaf, wide) for n, leaf in running.items() if jnp.issubdtype(leaf.dtype, jnp.floating)},
    }


def _widen(leaf: jax.Array, wide: Any) -> jax.Array:
    """Return the stored value of a leaf in a wider dtype.

    A GPU's compiler leaves out the rounding to 16 bits where it fuses the update with this cast
    (`xla_allow_excess_precision`), so the rounding is said once more.
    """
    if leaf.dtype.itemsize > 2:
        return leaf.astype(wide)
    own = jnp.finfo(leaf.dtype)
    return jax.lax.reduce_precision(leaf.astype(wide), own.nexp, own.nmant)


def moved_averages(state: Any, params: Any, statistics: Any, step: Any, applied: Any) -> Averages:
    """Return the averages after an update, traceable.

    Args:
        state: the state before the update.
        params, statistics: those after it.
        step: number of applied updates after it, int32 scalar.
        applied: whether it is applied, boolean scalar; None if it is.
    """
    ema, before = state.recipe.ema, state.averages
    if ema is None:
        return {}
    values = averaged_values(params, statistics, before["model"], state.recipe)
    wide = jnp.float64 if state.recipe.policy.param == "float64" else jnp.float32
    share = average_share(ema, step.astype(wide), applied, XP)
    return {
        role: {name: move_average(old, values[role][name], share, XP) for name, old in own.items()}
        for role, own in before.items()
    }


def averaged_model(state: Any) -> Any:
    """Return a model of its own with copies of the averages, and of everything else.

    Raises:
        UnsupportedError: the model cannot be copied.
    """
    return state.setup.adapter.copy(*_averaged_values(state))


def averaged(state: Any) -> AbstractContextManager[Any]:
    """Return a context manager that yields the model with copies of the averages, and of everything else."""
    return state.setup.adapter.exchange(*_averaged_values(state))  # type: ignore[no-any-return]  # the state is Any


def _averaged_values(state: Any) -> tuple[Any, Any]:
    """Return the parameters and the running state with the averages."""
    statistics = _replace_leaves(state.running.statistics, state.averages.get("running", {}))
    return copy_arrays(averaged_parameters(state)), copy_arrays(state.running._replace(statistics=statistics))


def averaged_parameters(state: Any) -> Any:
    """Return the parameters' tree with the averages."""
    return _replace_leaves(state.params, state.averages["model"] if state.averages else _optimizer_averages(state))


def _optimizer_averages(state: Any) -> dict[str, jax.Array]:
    """Return the averages of an optimizer that has its own, by path."""
    slots = {slot: jax.tree.leaves(tree) for slot, tree in state.opt_state.slots.items()}
    return {
        path: state.groups.of(path).spec.average(leaf, {slot: leaves[number] for slot, leaves in slots.items()})
        for number, (path, leaf) in enumerate(named_leaves(state.params).items())
    }


def kept_averages(state: Any, made: Averages, survivors: Mapping[str, str]) -> Averages:
    """Return the averages of a refreshed state: those of surviving parameters go on, others are new (S28)."""
    old = state.averages.get("model", {})
    kept = {name: copy_arrays(old[was]) for name, was in survivors.items() if was in old}
    return {
        role: {name: kept.get(name, leaf) if role == "model" else leaf for name, leaf in own.items()}
        for role, own in made.items()
    }


def _replace_leaves(tree: Any, averages: Mapping[str, jax.Array]) -> Any:
    """Return the tree with averages in place of the leaves of their names, in the leaves' dtypes."""
    leaves = [averages[n].astype(leaf.dtype) if n in averages else leaf for n, leaf in named_leaves(tree).items()]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)

"""Refresh of a training state after its model changed (S28). In JAX this returns a new state.

Every array of the new state is a copy, so that either state may be donated. A parameter is kept if the model contains
the same array object as the state, as `state.model` does, or an array with the same path, shape and values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.rules.refresh import KnownParameter, RefreshPlan, missing_model_error
from polyamp_jax.arrays import copy_arrays, named_leaves, path_name
from polyamp_jax.models.adapter import check_streams
from polyamp_jax.models.libraries import adapt
from polyamp_jax.step.averages import kept_averages
from polyamp_jax.step.optimizers import FormulaState, lagging_parameters
from polyamp_jax.step.state import JaxState, create_state


def refresh_state(state: JaxState, model: Any, plan: RefreshPlan) -> JaxState:
    """Return a new state for the changed model. The old state is not modified.

    Raises:
        ModelError: no model, or values that do not show whether a parameter was kept or replaced.
        StateError: the old state's arrays were donated or deleted (checked and raised by the caller).
    """
    if model is None:
        raise missing_model_error("a JAX state is a value that sees no change of a model")
    parts = adapt(model, axis_name=getattr(state.setup.adapter, "axis_name", None))
    if state.rngs:
        check_streams(parts.adapter, state.rngs)
    before, now = named_leaves(state.params), named_leaves(parts.params)
    survivors = plan.surviving_parameters(
        _known_parameters(before), _known_parameters(now), lambda old, new: _is_equal(before[old], now[new])
    )
    made = create_state(parts, state.recipe, state.rngs, copy_arrays(state.scale_state), state.backend)
    opt_state = _carry_state(state, made, survivors)
    running = made.running._replace(draws=copy_arrays(state.running.draws))
    averages = kept_averages(state, made.averages, survivors)
    kept = dataclasses.replace(
        made, opt_state=opt_state, running=running, step=copy_arrays(state.step), averages=averages
    )
    kept.setup.watch = state.setup.watch  # the host continues to count the state's steps (S17)
    return kept.with_host_facts(lagging_parameters(opt_state))


def _known_parameters(named: Mapping[str, Any]) -> dict[str, KnownParameter]:
    return {name: KnownParameter(id(leaf), tuple(jnp.shape(leaf))) for name, leaf in named.items()}


def _is_equal(one: Any, other: Any) -> bool:
    return one is other or bool(np.array_equal(np.asarray(one), np.asarray(other)))


def _carry_state(state: JaxState, made: JaxState, survivors: Mapping[str, str]) -> Any:
    """Return the new optimizer's state with the old entries of kept parameters and of all parameters together."""
    if isinstance(made.opt_state, FormulaState) and isinstance(state.opt_state, FormulaState):
        return _carry_formula_state(state, made, survivors)
    before = {tuple(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state)}
    paths = {path_name(path): tuple(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.params)}
    known = {tuple(path): path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(made.params)}

    def one(path: Any, leaf: Any) -> Any:
        path = tuple(path)
        start = next((n for n in range(len(path)) if path[n:] in known), None)
        if start is None:  # shared by all parameters, such as a count or an injected rate
            old = before.get(path)
        else:
            name = survivors.get(known[path[start:]])
            old = None if name is None else before.get((*path[:start], *paths[name]))
        same = old is not None and jnp.shape(old) == jnp.shape(leaf) and old.dtype == leaf.dtype
        return copy_arrays(old) if same else leaf

    return jax.tree_util.tree_map_with_path(one, made.opt_state)


def _carry_formula_state(state: JaxState, made: JaxState, survivors: Mapping[str, str]) -> FormulaState:
    """Carry over the state of polyamp's own formulas. A new parameter counts as having missed all updates so far."""
    old: FormulaState = state.opt_state
    numbers = {name: number for number, name in enumerate(named_leaves(state.params))}
    missed = np.asarray(old.missed)
    counts = [
        missed[numbers[survivors[name]]] if name in survivors else np.asarray(old.count)
        for name in named_leaves(made.params)
    ]
    slots = {}
    for slot, tree in made.opt_state.slots.items():
        if slot not in old.slots:
            slots[slot] = tree
            continue
        own = named_leaves(old.slots[slot])
        leaves = [
            copy_arrays(own[survivors[name]]) if name in survivors else leaf
            for name, leaf in named_leaves(tree).items()
        ]
        slots[slot] = jax.tree.unflatten(jax.tree.structure(tree), leaves)
    return FormulaState(copy_arrays(old.count), jnp.array(np.array(counts, np.int32)), slots)

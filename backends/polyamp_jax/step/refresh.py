"""The state that goes on with a changed model (S28), which in JAX is a value. Called by the backend.

Every array of the new state is a copy, so that either state may be donated. A parameter stayed if the model holds the
very array of the state, as `state.model` does, or one with its path, shape and values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.rules.growing import Growth, Known, needs_model
from polyamp_jax.arrays import fresh, named_leaves, path_name
from polyamp_jax.models.adapt import adapt
from polyamp_jax.step.optimizers import FormulaState, lagging
from polyamp_jax.step.state import JaxState, create


def refreshed(state: JaxState, model: Any, growth: Growth) -> JaxState:
    """A new state around the model; the old one stays as it is.

    Raises:
        ModelError: no model, or values that neither say that a parameter stayed nor that it was replaced.
        StateError: the old state's arrays are gone (from the caller, which looks).
    """
    if model is None:
        raise needs_model("a JAX state is a value that sees no change of a model")
    parts = adapt(model, axis_name=getattr(state.setup.adapter, "axis_name", None))
    if state.rngs:
        parts.adapter.check_streams(state.rngs)
    before, now = named_leaves(state.params), named_leaves(parts.params)
    stayed = growth.stayed(_known(before), _known(now), lambda old, new: _equal(before[old], now[new]))
    made = create(parts, state.recipe, state.rngs, fresh(state.scale_state), state.backend)
    opt_state = _carried(state, made, stayed)
    running = made.running._replace(draws=fresh(state.running.draws))
    kept = dataclasses.replace(made, opt_state=opt_state, running=running, step=fresh(state.step))
    kept.setup.watch = state.setup.watch  # the host goes on counting the state's steps (S17)
    return kept.knowing(lagging(opt_state))


def _known(named: Mapping[str, Any]) -> dict[str, Known]:
    return {name: Known(id(leaf), tuple(jnp.shape(leaf))) for name, leaf in named.items()}


def _equal(one: Any, other: Any) -> bool:
    return one is other or bool(np.array_equal(np.asarray(one), np.asarray(other)))


def _carried(state: JaxState, made: JaxState, stayed: Mapping[str, str]) -> Any:
    """The new optimizer's state with what the old one kept for the parameters that stayed, and for all together."""
    if isinstance(made.opt_state, FormulaState) and isinstance(state.opt_state, FormulaState):
        return _carried_formula(state, made, stayed)
    before = {tuple(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state)}
    paths = {path_name(path): tuple(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.params)}
    known = {tuple(path): path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(made.params)}

    def one(path: Any, leaf: Any) -> Any:
        path = tuple(path)
        start = next((n for n in range(len(path)) if path[n:] in known), None)
        if start is None:  # of all parameters together, such as a count or an injected rate
            old = before.get(path)
        else:
            name = stayed.get(known[path[start:]])
            old = None if name is None else before.get((*path[:start], *paths[name]))
        same = old is not None and jnp.shape(old) == jnp.shape(leaf) and old.dtype == leaf.dtype
        return fresh(old) if same else leaf

    return jax.tree_util.tree_map_with_path(one, made.opt_state)


def _carried_formula(state: JaxState, made: JaxState, stayed: Mapping[str, str]) -> FormulaState:
    """The same of polyamp's own formulas, which count the updates that each parameter missed: a new one missed all."""
    old: FormulaState = state.opt_state
    numbers = {name: number for number, name in enumerate(named_leaves(state.params))}
    missed = np.asarray(old.missed)
    counts = [
        missed[numbers[stayed[name]]] if name in stayed else np.asarray(old.count) for name in named_leaves(made.params)
    ]
    slots = {}
    for slot, tree in made.opt_state.slots.items():
        if slot not in old.slots:
            slots[slot] = tree
            continue
        own = named_leaves(old.slots[slot])
        leaves = [fresh(own[stayed[name]]) if name in stayed else leaf for name, leaf in named_leaves(tree).items()]
        slots[slot] = jax.tree.unflatten(jax.tree.structure(tree), leaves)
    return FormulaState(fresh(old.count), jnp.array(np.array(counts, np.int32)), slots)

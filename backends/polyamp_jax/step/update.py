"""Second half of the step: measure gradients, and commit what `rules.update_decision` decides (S9 to S15).

Everything here is traceable and never waits for the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from polyamp.monitor.slots import MonitorSelection
from polyamp.results import Gradients, StepResult
from polyamp.rules import clip
from polyamp.rules.update_decision import GradStats, Skip, UpdateDecision, decide
from polyamp_jax.arrays import XP, select_if_finite
from polyamp_jax.models.parameter_writes import overlay_writes
from polyamp_jax.models.running_state import RunningState
from polyamp_jax.step.averages import moved_averages
from polyamp_jax.step.grad_stats import fit_gradients, sharded_norm_and_finite
from polyamp_jax.step.jax_only.native_transformations import OptaxExtraArguments
from polyamp_jax.step.monitor_slots import update_slots
from polyamp_jax.step.optimizers import leaves_like, update_parameters
from polyamp_jax.step.state import JaxState


def update_states(
    states: Sequence[JaxState], grads: Sequence[Gradients], skip: Skip, monitor: MonitorSelection | None = None
) -> tuple[list[JaxState], list[StepResult]]:
    """Run the second half of the step for one or several states."""
    fitted = [fit_gradients(state, item) for state, item in zip(states, grads, strict=True)]
    values = [_zero_waiting(state, each) for state, each in zip(states, fitted, strict=True)]
    found = [sharded_norm_and_finite(state, each) for state, each in zip(states, values, strict=True)]
    flags = [finite for _, finite in found]
    after, results = [], []
    for state, item, each, (norm, finite) in zip(states, grads, values, found, strict=True):
        stats = GradStats(norm.astype(jnp.float32), finite, item.weight)
        decision = decide(state.recipe.loss_scaler, state.scale_state, state.step, stats, flags, skip, XP)
        after.append(_commit_update(state, item, each, norm, decision))
        result = decision.result(stats)
        if monitor is not None:
            result = result._replace(monitor=update_slots(monitor, state, after[-1], each))
        results.append(result)
    return after, results


def _trains_now(state: JaxState) -> list[Any]:
    """Return whether each parameter takes an update in this step (S27), boolean scalars; None where it always does."""
    named = {start: state.step >= start for start in set(state.groups.starts.values())}
    return [named.get(state.groups.of(path).start) for path in state.groups.numbers]


def _zero_waiting(state: JaxState, values: Any) -> Any:
    """Return the gradients, with zeros for parameters that do not train yet: no part of norm and flag."""
    if not state.groups.starts:
        return values
    leaves = [
        grad if trains is None or grad is None else jnp.where(trains, grad, jnp.zeros_like(grad))
        for grad, trains in zip(leaves_like(values, state.params), _trains_now(state), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(state.params), leaves)


def _clip_gradients(state: JaxState, values: Any, norm: jax.Array) -> Any:
    """Return the clipped gradients (S11)."""
    structure = jax.tree.structure(state.params)
    leaves = leaves_like(values, state.params)
    sets = state.groups.clip_sets(state.recipe.clip)

    def norm_of(places: list[int]) -> jax.Array:
        kept = [leaf if place in places else None for place, leaf in enumerate(leaves)]
        return sharded_norm_and_finite(state, jax.tree.unflatten(structure, kept))[0]

    return jax.tree.unflatten(structure, clip.clip_gradients(sets, leaves, norm, norm_of, XP))


def _commit_update(
    state: JaxState, grads: Gradients, values: Any, norm: jax.Array, decision: UpdateDecision
) -> JaxState:
    """Clip, update, and select the old or the new values.

    The selection is elementwise, not a conditional. XLA fuses it into the update's own loop, which reads the old
    values anyway. A conditional would make a GPU's host wait for the flag.
    """
    running = grads.running
    extra = OptaxExtraArguments(grads.loss, values)
    values = _clip_gradients(state, values, norm)
    idle = frozenset(n for n, grad in enumerate(leaves_like(values, state.params)) if grad is None)
    trains = _trains_now(state) if state.groups.starts else None
    late = frozenset(n for n, own in enumerate(trains or ()) if own is not None)
    even = state.lagging is not None and state.lagging <= idle | late
    params, opt_state = update_parameters(
        state.setup.optimizer,
        values,
        state.opt_state,
        overlay_writes(state.params, running.written),
        even=even,
        finite=decision.finite,
        extra=extra,
        skipped=state.params,
        trains=trains,
    )
    statistics = select_if_finite(decision.finite, running.statistics, state.running.statistics)
    made = dataclasses.replace(
        state,
        params=params,
        opt_state=opt_state,
        scale_state=decision.scale_state,
        running=RunningState(statistics, running.streams, jnp.zeros_like(running.draws)),
        step=decision.step,
        averages=moved_averages(state, params, statistics, decision.step, decision.finite),
    )
    if state.layout is not None:
        leaves, structure = jax.tree.flatten(made)
        made = jax.tree.unflatten(structure, state.layout.keep_shardings(leaves))
    return made.with_host_facts(None if state.lagging is None else state.lagging | idle, state.layout)

"""The second half of the step: decide, clip, update, commit and adjust the scale (S9 to S15). Called by `step`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from polyamp.results import Gradients, StepResult
from polyamp.rules import clip
from polyamp.rules.decide import Skip
from polyamp.rules.scale import update
from polyamp_jax.arrays import XP, conform, is_key
from polyamp_jax.models.parts import Running
from polyamp_jax.step.measure import fitted, norm_and_finite
from polyamp_jax.step.optimizers import like, updated
from polyamp_jax.step.replicas import check_axes
from polyamp_jax.step.state import JaxState


def applied(
    states: Sequence[JaxState], grads: Sequence[Gradients], skip: Skip
) -> tuple[list[JaxState], list[StepResult]]:
    """The second half (S9 to S15): flags, clip, optimizer, and one scale adjustment on the AND of the flags (S14)."""
    check_axes("apply_gradients")
    values = [fitted(state, item) for state, item in zip(states, grads, strict=True)]
    measured = [norm_and_finite(jax.tree.leaves(tree)) for tree in values]
    every = jnp.stack([finite for _, finite in measured]).all()
    outcomes = [
        _updated(state, tree, item.running, norm, every if skip == "all" else finite, every)
        for state, tree, item, (norm, finite) in zip(states, values, grads, measured, strict=True)
    ]
    return [state for state, _ in outcomes], [result for _, result in outcomes]


def _updated(
    state: JaxState, values: Any, running: Running, norm: Any, finite: Any, every: Any
) -> tuple[JaxState, StepResult]:
    """Clip, update and, where `finite`, commit; `every` moves the scale.

    Old and new are chosen by elementwise select, not by a conditional: XLA fuses it into the update's own loop, which
    reads the old values anyway, while a conditional would make a GPU's host wait for the flag.
    """
    recipe, scaler = state.recipe, state.recipe.loss_scaler
    if recipe.clip_norm is not None:
        factor = clip.factor(norm, recipe.clip_norm, XP)
        values = jax.tree.map(lambda g: g * factor.astype(g.dtype), values)
    idle = frozenset(n for n, grad in enumerate(like(values, state.params)) if grad is None)
    even = state.lagging is not None and state.lagging <= idle
    params, opt_state = updated(recipe.optimizer, values, state.opt_state, state.params, even=even)
    old = (state.params, state.opt_state, state.running.statistics, state.step)
    opt_state = conform(opt_state, state.opt_state, what="the optimizer's state")
    new = (params, opt_state, running.statistics, state.step + 1)
    scale_state, skipped = state.scale_state, jnp.asarray(False)
    if scaler.checks:
        new = jax.tree.map(
            lambda after, before: after if is_key(before) else jnp.where(finite, after, before), new, old
        )
        scale_state, skipped = update(scaler, state.scale_state, every, XP), ~finite
    params, opt_state, statistics, step = new
    made = dataclasses.replace(
        state,
        params=params,
        opt_state=opt_state,
        scale_state=scale_state,
        running=Running(statistics, running.streams, jnp.zeros_like(running.draws)),
        step=step,
    )
    if state.lagging is not None:
        made = made.knowing(state.lagging | idle)
    return made, StepResult(None, None, norm, scale_state.scale, skipped, step)

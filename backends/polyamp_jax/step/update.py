"""The second half of the step as `rules.decide` has it: what JAX measures and how it commits (S9 to S15).

Called by `step`. All of it is traceable and never waits for the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import jax
import jax.numpy as jnp

from polyamp.recipe.scaler import LossScaler
from polyamp.results import Gradients, StepResult
from polyamp.rules import clip, decide
from polyamp.rules.decide import Decision, Measured, Skip
from polyamp_jax.arrays import XP, chosen
from polyamp_jax.models.parameter_writes import overlaid
from polyamp_jax.models.parts import Running
from polyamp_jax.step.extra_arguments import Asked
from polyamp_jax.step.measure import fitted, norm_and_finite_of
from polyamp_jax.step.optimizers import like, updated
from polyamp_jax.step.state import JaxState


def applied(
    states: Sequence[JaxState], grads: Sequence[Gradients], skip: Skip
) -> tuple[list[JaxState], list[StepResult]]:
    """The second half for one or several states."""
    return decide.update(states, grads, skip, _VERBS)


class JaxVerbs(decide.Verbs[JaxState, Gradients]):
    """Measures and commits without a branch on a value."""

    xp = XP

    def scaler(self, state: JaxState) -> LossScaler:
        return state.recipe.loss_scaler

    def measure(self, state: JaxState, grads: Gradients) -> Measured:
        values = fitted(state, grads)
        norm, finite = norm_and_finite_of(state, values)
        return Measured(norm.astype(jnp.float32), finite, (values, norm), grads.weight)

    def commit(self, state: JaxState, grads: Gradients, measured: Measured, decision: Decision) -> JaxState:
        """Clip, update and choose.

        Old and new are chosen by elementwise select, not by a conditional: XLA fuses it into the update's own loop,
        which reads the old values anyway, while a conditional would make a GPU's host wait for the flag.
        """
        recipe, running = state.recipe, grads.running
        values, norm = measured.more
        asked = Asked(grads.loss, values)
        if recipe.clip_norm is not None:
            factor = clip.factor(norm, recipe.clip_norm, XP)
            values = jax.tree.map(lambda g: g * factor.astype(g.dtype), values)
        idle = frozenset(n for n, grad in enumerate(like(values, state.params)) if grad is None)
        even = state.lagging is not None and state.lagging <= idle
        params, opt_state = updated(
            state.setup.optimizer,
            values,
            state.opt_state,
            overlaid(state.params, running.written),
            even=even,
            finite=decision.finite,
            asked=asked,
            skipped=state.params,
        )
        statistics = chosen(decision.finite, running.statistics, state.running.statistics)
        made = dataclasses.replace(
            state,
            params=params,
            opt_state=opt_state,
            scale_state=decision.scale_state,
            running=Running(statistics, running.streams, jnp.zeros_like(running.draws)),
            step=decision.step,
        )
        if state.layout is not None:
            leaves, structure = jax.tree.flatten(made)
            made = jax.tree.unflatten(structure, state.layout.kept(leaves))
        return made.knowing(None if state.lagging is None else state.lagging | idle, state.layout)


_VERBS: Final = JaxVerbs()

"""Second half of a step: MLX's update hooks for `rules.update_decision`, which makes all decisions."""

from __future__ import annotations

import dataclasses
import itertools

import mlx.core as mx

from polyamp.recipe.scaler import LossScaler
from polyamp.results import Gradients
from polyamp.rules import update_decision
from polyamp.rules.update_decision import GradStats, UpdateDecision
from polyamp_mlx.arrays import XP, copy_array
from polyamp_mlx.step.grad_stats import global_norm_and_finite
from polyamp_mlx.step.optimizers import update_parameters
from polyamp_mlx.step.random_streams import next_seed
from polyamp_mlx.step.state import MLXState


class MLXUpdateHooks(update_decision.UpdateHooks[MLXState, Gradients]):
    """`measure` and `commit` on MLX arrays; both only extend the graph, without synchronisation."""

    xp = XP

    def scaler(self, state: MLXState) -> LossScaler:
        return state.recipe.loss_scaler

    def measure(self, state: MLXState, grads: Gradients) -> GradStats:
        return global_norm_and_finite(grads)

    def commit(self, state: MLXState, grads: Gradients, measured: GradStats, decision: UpdateDecision) -> MLXState:
        """Compute every array both ways and select on the device, so that the host does not wait for the flag (S12)."""

        def chosen(new: mx.array, old: mx.array) -> mx.array:
            new = new.astype(old.dtype)
            return copy_array(new if decision.finite is None else mx.where(decision.finite, new, old))

        parameters, slots, counts = update_parameters(state, grads, measured, chosen)
        after: MLXState = dataclasses.replace(
            state,
            parameters=parameters,
            running={path: chosen(grads.running[path], old) for path, old in state.running.items()},
            slots=slots,
            counts=counts,
            scale_state=decision.scale_state,
            step=decision.step,
            seed=next_seed(state.seed),
            draws=itertools.count(),
        )
        return after

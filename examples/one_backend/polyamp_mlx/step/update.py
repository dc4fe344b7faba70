"""The second half of a step: the two verbs that `rules.decide` asks of a framework. Nothing here decides anything."""

from __future__ import annotations

import dataclasses
import itertools

import mlx.core as mx

from polyamp.recipe.scaler import LossScaler
from polyamp.results import Gradients
from polyamp.rules import decide
from polyamp.rules.decide import Decision, Measured
from polyamp_mlx.arrays import XP, fresh
from polyamp_mlx.step.measure import measured
from polyamp_mlx.step.optimizers import stepped
from polyamp_mlx.step.state import MLXState
from polyamp_mlx.step.streams import next_seed


class MLXVerbs(decide.Verbs[MLXState, Gradients]):
    """`measure` and `commit` on MLX's arrays; both only add to the graph, and wait for nothing."""

    xp = XP

    def scaler(self, state: MLXState) -> LossScaler:
        return state.recipe.loss_scaler

    def measure(self, state: MLXState, grads: Gradients) -> Measured:
        return measured(grads)

    def commit(self, state: MLXState, grads: Gradients, measured: Measured, decision: Decision) -> MLXState:
        """Every array is computed both ways and chosen on the device, so that nobody waits for the flag (S12)."""

        def chosen(new: mx.array, old: mx.array) -> mx.array:
            new = new.astype(old.dtype)
            return fresh(new if decision.finite is None else mx.where(decision.finite, new, old))

        parameters, slots, counts = stepped(state, grads, measured, chosen)
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

"""The second half of a step: the two verbs that `rules.decide` asks of a framework. Nothing here decides anything."""

from __future__ import annotations

import itertools

import mlx.core as mx
import msgspec

from polyamp.recipe.scaler import LossScaler
from polyamp.results import Gradients
from polyamp.rules import clip, decide
from polyamp.rules.decide import Decision, Measured
from polyamp_mlx.arrays import XP, fresh
from polyamp_mlx.step.differentiate import next_seed
from polyamp_mlx.step.state import Arrays, MLXState


class MLXVerbs(decide.Verbs[MLXState, Gradients]):
    """`measure` and `commit` on MLX's arrays; both only add to the graph, and wait for nothing."""

    xp = XP

    def scaler(self, state: MLXState) -> LossScaler:
        return state.recipe.loss_scaler

    def measure(self, state: MLXState, grads: Gradients) -> Measured:
        """Flag and norm (S10, S11). Squares of large and small gradients leave float32, so the norm is taken of the
        gradients over their largest magnitude."""
        values = [value.astype(mx.float32) for value in grads.values.values() if value is not None]
        finite = mx.all(mx.stack([mx.all(mx.isfinite(value)) for value in values]))
        largest = mx.max(mx.stack([mx.max(mx.abs(value)) for value in values]))
        unit = mx.where(finite & (largest > 0), largest, 1.0)
        squares = mx.stack([mx.sum(mx.square(value / unit)) for value in values])
        return Measured(unit * mx.sqrt(mx.sum(squares)), finite)

    def commit(self, state: MLXState, grads: Gradients, measured: Measured, decision: Decision) -> MLXState:
        """Clip, let the optimizer's formula step every parameter that has a gradient (S23), and keep the old arrays
        where the decision says so (S12)."""
        recipe = state.recipe
        rate = recipe.optimizer.rate(state.step, XP)
        factor = 1.0 if recipe.clip_norm is None else clip.factor(measured.norm, recipe.clip_norm, XP)

        def chosen(new: mx.array, old: mx.array) -> mx.array:
            new = new.astype(old.dtype)
            return fresh(new if decision.finite is None else mx.where(decision.finite, new, old))

        parameters, slots, counts = dict(state.parameters), dict(state.slots), dict(state.counts)
        for path, value in grads.values.items():
            if value is None:
                continue
            old, kept, count = parameters[path], slots[path], counts[path] + 1
            grad = value.astype(mx.float32) * factor
            new, moved = recipe.optimizer.update(XP, old.astype(mx.float32), grad, kept, rate, count.astype(mx.float32))
            parameters[path] = chosen(new, old)
            slots[path] = {slot: chosen(moved[slot], kept[slot]) for slot in kept}
            counts[path] = chosen(count, counts[path])
        running: Arrays = {path: chosen(grads.running[path], old) for path, old in state.running.items()}
        after: MLXState = msgspec.structs.replace(
            state,
            parameters=parameters,
            running=running,
            slots=slots,
            counts=counts,
            scale_state=decision.scale_state,
            step=decision.step,
            seed=next_seed(state.seed),
            draws=itertools.count(),
        )
        return after

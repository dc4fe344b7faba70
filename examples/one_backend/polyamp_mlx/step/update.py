"""Second half of a step on MLX arrays: measure, decide by `rules.update_decision`, commit, without synchronisation."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import mlx.core as mx

from polyamp.results import Gradients, StepResult
from polyamp.rules.update_decision import GradStats, Skip, UpdateDecision, decide
from polyamp_mlx.arrays import XP, copy_array
from polyamp_mlx.step.grad_stats import global_norm_and_finite
from polyamp_mlx.step.optimizers import update_parameters
from polyamp_mlx.step.random_streams import next_seed
from polyamp_mlx.step.state import MLXState


def update_states(
    states: Sequence[MLXState], grads: Sequence[Gradients], skip: Skip
) -> tuple[list[MLXState], list[StepResult]]:
    """Update states that step together."""
    grads = [without_waiting(state, item) for state, item in zip(states, grads, strict=True)]
    measured = [global_norm_and_finite(item) for item in grads]
    flags = [stats.finite for stats in measured]
    after, results = [], []
    for state, item, stats in zip(states, grads, measured, strict=True):
        decision = decide(state.recipe.loss_scaler, state.scale_state, state.step, stats, flags, skip, XP)
        after.append(commit_update(state, item, stats, decision))
        results.append(decision.result(stats))
    return after, results


def without_waiting(state: MLXState, grads: Gradients) -> Gradients:
    """Return the gradients, None for parameters that do not train yet (S27). Then the host reads a count."""
    if not state.groups.starts:
        return grads
    step = int(state.step.item())
    waiting = {path: None for path, start in state.groups.starts.items() if step < start}
    return grads._replace(values={**grads.values, **waiting})


def commit_update(state: MLXState, grads: Gradients, stats: GradStats, decision: UpdateDecision) -> MLXState:
    """Compute every array both ways and select on the device, so that the host does not wait for the flag (S12)."""

    def chosen(new: mx.array, old: mx.array) -> mx.array:
        new = new.astype(old.dtype)
        return copy_array(new if decision.finite is None else mx.where(decision.finite, new, old))

    parameters, slots, counts = update_parameters(state, grads, stats, chosen)
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

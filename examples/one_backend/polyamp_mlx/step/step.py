"""`train_step`: micro-batches, their mean, one update (S8). What a step makes is computed before it is handed out."""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx

from polyamp.results import Gradients, LossFunction, StepResult
from polyamp.rules import decide
from polyamp.rules.batches import micro_batches
from polyamp.rules.window import joins
from polyamp.trees import map_trees
from polyamp_mlx.arrays import computed
from polyamp_mlx.step.differentiate import differentiated, entered
from polyamp_mlx.step.measure import unscaled
from polyamp_mlx.step.state import MLXState
from polyamp_mlx.step.update import MLXVerbs


def step(loss_fn: LossFunction, state: MLXState, batch: Any) -> tuple[MLXState, StepResult]:
    """One training step."""
    recipe = state.recipe
    parts, window = micro_batches(entered(batch, recipe.policy.param), recipe.accumulate_steps)
    losses, auxes, total, now = [], [], dict[str, Any](), state
    for draw, (part, share) in enumerate(zip(parts, window.shares, strict=True)):
        loss, aux, (scaled,) = differentiated(loss_fn, [now], part, draw, share)
        losses.append(loss * share)
        auxes.append(aux)
        total = {path: _sum(total.get(path), value) for path, value in scaled.values.items()}
        now = dataclasses.replace(now, running=scaled.running)
        computed((loss, total))  # frees this part's activations
    mean = {path: None if value is None else value / window.total for path, value in total.items()}
    grads = unscaled(Gradients(mean, now.running), state)
    (state,), (result,) = decide.update([state], [grads], "all", MLXVerbs())
    aux = auxes[0] if recipe.accumulate_steps == 1 or auxes[0] is None else map_trees(_stacked, auxes)
    result = result._replace(loss=mx.sum(mx.stack(losses)) / window.total, aux=aux)
    computed((state.arrays, result))
    return state, result


def _sum(total: Any, value: Any) -> Any:
    return value if total is None else total if value is None else total + value


def _stacked(values: list[Any]) -> Any:
    if not isinstance(values[0], mx.array):
        return values
    return mx.concatenate(values) if joins([value.shape for value in values]) else mx.stack(values)

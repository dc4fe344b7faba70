"""`train_step`: micro-batches, their mean, one update (S8). What a step makes is computed before it is handed out."""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx

from polyamp.results import Gradients, LossFunction, StepResult
from polyamp.rules import decide, weights
from polyamp.rules.batches import micro_batches
from polyamp.rules.weights import Loss, Totals, WeightFunction
from polyamp.rules.window import Window, joins
from polyamp.trees import map_trees
from polyamp_mlx.arrays import computed
from polyamp_mlx.step.differentiate import differentiated, entered
from polyamp_mlx.step.measure import unscaled
from polyamp_mlx.step.state import MLXState
from polyamp_mlx.step.update import MLXVerbs


def step(
    loss_fn: LossFunction, state: MLXState, batch: Any, weight: WeightFunction | None = None
) -> tuple[MLXState, StepResult]:
    """One training step."""
    recipe = state.recipe
    parts, window = micro_batches(entered(batch, recipe.policy.param), recipe.accumulate_steps)
    given = [weights.of_batch(weight, part) for part in parts]
    if recipe.accumulate_steps == 1:
        read, (scaled,) = differentiated(loss_fn, [state], parts[0], 0, weight=given[0])
        loss, aux, grads = read.value, read.aux, unscaled(scaled, state)
    else:
        loss, aux, grads = _accumulated(loss_fn, state, parts, window, given)
    (state,), (result,) = decide.update([state], [grads], "all", MLXVerbs())
    result = result._replace(loss=loss, aux=aux)
    computed((state.arrays, result))
    return state, result


def _accumulated(
    loss_fn: LossFunction, state: MLXState, parts: list[Any], window: Window, given: list[Any]
) -> tuple[mx.array, Any, Gradients]:
    """The mean loss, stacked aux and gradients of a window, each micro-batch by its weight (S8)."""
    totals, passes = None, _passes(loss_fn, state, parts, window, given)
    if passes is None:  # a sum of means: what each is divided by has to be known first
        counts = [
            weights.counts_of(differentiated(loss_fn, [state], part, draw)[0], rows)
            for draw, (part, rows) in enumerate(zip(parts, window.sizes, strict=True))
        ]
        totals = weights.totals_of(counts)
        passes = _passes(loss_fn, state, parts, window, given, totals) or []
    losses = [loss for loss, _ in passes]
    own = [1.0] * len(parts) if totals is not None else [float(size) for size in window.sizes]
    if totals is None and weights.consistent(losses):
        own = [loss.weight for loss in losses]
    whole = mx.sum(mx.stack([mx.array(each, mx.float32) for each in own]))
    factors = [each / mx.where(whole > 0.0, whole, 1.0) for each in own]
    total: dict[str, Any] = {}
    for (_, scaled), factor in zip(passes, factors, strict=True):
        for path, value in scaled.values.items():
            part = None if value is None else mx.where(factor > 0.0, value * factor, 0.0)
            total[path] = _sum(total.get(path), part)
    loss = mx.sum(mx.stack([one.value * factor for one, factor in zip(losses, factors, strict=True)]))
    aux = None if losses[0].aux is None else map_trees(_stacked, [one.aux for one in losses])
    found = whole if losses[0].weight is not None else None
    if totals is not None:
        found = mx.sum(mx.stack([mx.array(count, mx.float32) for count in totals.counts]))
    return loss, aux, unscaled(Gradients(total, passes[-1][1].running, loss, found), state)


def _passes(
    loss_fn: LossFunction,
    state: MLXState,
    parts: list[Any],
    window: Window,
    given: list[Any],
    totals: Totals | None = None,
) -> list[tuple[Loss, Gradients]] | None:
    """The passes of a window, through which running statistics flow; None where they ask for `totals`."""
    passes = []
    for draw, (part, rows, own) in enumerate(zip(parts, window.sizes, given, strict=True)):
        read, (scaled,) = differentiated(loss_fn, [state], part, draw, weight=own, totals=totals, rows=rows)
        if read.terms and totals is None and len(parts) > 1:
            return None
        passes.append((read, scaled))
        state = dataclasses.replace(state, running=scaled.running)
        computed((read.value, scaled.values))  # frees this part's activations
    return passes


def _sum(total: Any, value: Any) -> Any:
    return value if total is None else total if value is None else total + value


def _stacked(values: list[Any]) -> Any:
    if not isinstance(values[0], mx.array):
        return values
    return mx.concatenate(values) if joins([value.shape for value in values]) else mx.stack(values)

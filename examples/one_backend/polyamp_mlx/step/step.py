"""`training_step`: micro-batches, their mean, one update (S8). Results are evaluated before they are returned."""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx

from polyamp.results import Gradients, LossFunction, StepResult
from polyamp.rules import loss_weights
from polyamp.rules.accumulation import Accumulation, is_concatenated
from polyamp.rules.batches import micro_batches
from polyamp.rules.loss_weights import LossOutput, TermTotals, WeightFunction
from polyamp.trees import map_tree
from polyamp_mlx.arrays import evaluate_arrays
from polyamp_mlx.step.forward_backward import loss_and_gradients, prepare_batch
from polyamp_mlx.step.grad_stats import unscale_gradients
from polyamp_mlx.step.state import MLXState
from polyamp_mlx.step.update import update_states


def training_step(
    loss_fn: LossFunction, state: MLXState, batch: Any, weight: WeightFunction | None = None
) -> tuple[MLXState, StepResult]:
    """Run one training step."""
    recipe = state.recipe
    parts, window = micro_batches(prepare_batch(batch, recipe.policy.param), recipe.accumulate_steps)
    given = [loss_weights.batch_loss_weight(weight, part) for part in parts]
    if recipe.accumulate_steps == 1:
        read, (scaled,) = loss_and_gradients(loss_fn, [state], parts[0], 0, weight=given[0])
        loss, aux, grads = read.value, read.aux, unscale_gradients(scaled, state)
    else:
        loss, aux, grads = _accumulate(loss_fn, state, parts, window, given)
    (state,), (result,) = update_states([state], [grads], "all")
    result = result._replace(loss=loss, aux=aux)
    evaluate_arrays((state.arrays, result))
    return state, result


def _accumulate(
    loss_fn: LossFunction, state: MLXState, parts: list[Any], window: Accumulation, given: list[Any]
) -> tuple[mx.array, Any, Gradients]:
    """Return the mean loss, stacked aux and gradients of an accumulation, each micro-batch by its weight (S8)."""
    totals, passes = None, _run_micro_batches(loss_fn, state, parts, window, given)
    if passes is None:  # a sum of means: its divisors must be known first
        counts = [
            loss_weights.term_counts(loss_and_gradients(loss_fn, [state], part, draw)[0], rows)
            for draw, (part, rows) in enumerate(zip(parts, window.sizes, strict=True))
        ]
        totals = loss_weights.term_totals(counts)
        passes = _run_micro_batches(loss_fn, state, parts, window, given, totals) or []
    losses = [loss for loss, _ in passes]
    own = [1.0] * len(parts) if totals is not None else [float(size) for size in window.sizes]
    if totals is None and loss_weights.has_own_weights(losses):
        own = [loss.weight for loss in losses]
    whole = mx.sum(mx.stack([mx.array(each, mx.float32) for each in own]))
    factors = [each / mx.where(whole > 0.0, whole, 1.0) for each in own]
    total: dict[str, Any] = {}
    for (_, scaled), factor in zip(passes, factors, strict=True):
        for path, value in scaled.values.items():
            part = None if value is None else mx.where(factor > 0.0, value * factor, 0.0)
            total[path] = _add_trees(total.get(path), part)
    loss = mx.sum(mx.stack([one.value * factor for one, factor in zip(losses, factors, strict=True)]))
    aux = None if losses[0].aux is None else map_tree(_stack_aux, *[one.aux for one in losses])
    found = whole if losses[0].weight is not None else None
    if totals is not None:
        found = mx.sum(mx.stack([mx.array(count, mx.float32) for count in totals.counts]))
    return loss, aux, unscale_gradients(Gradients(total, passes[-1][1].running, loss, found), state)


def _run_micro_batches(
    loss_fn: LossFunction,
    state: MLXState,
    parts: list[Any],
    window: Accumulation,
    given: list[Any],
    totals: TermTotals | None = None,
) -> list[tuple[LossOutput, Gradients]] | None:
    """Run the micro-batches in order, passing on running statistics; None if they need `totals` first."""
    passes = []
    for draw, (part, rows, own) in enumerate(zip(parts, window.sizes, given, strict=True)):
        read, (scaled,) = loss_and_gradients(loss_fn, [state], part, draw, weight=own, totals=totals, rows=rows)
        if read.terms and totals is None and len(parts) > 1:
            return None
        passes.append((read, scaled))
        state = dataclasses.replace(state, running=scaled.running)
        evaluate_arrays((read.value, scaled.values))  # frees this part's activations
    return passes


def _add_trees(total: Any, value: Any) -> Any:
    return value if total is None else total if value is None else total + value


def _stack_aux(*values: Any) -> Any:
    arrays = list(values)
    if not isinstance(arrays[0], mx.array):
        return arrays
    return mx.concatenate(arrays) if is_concatenated([array.shape for array in arrays]) else mx.stack(arrays)

"""The torch step: both halves on one state, over its micro-batches (S8).

`differentiate` is the first half, `update` the second; here gradients are unscaled and clipped in one go. Called by the
backend.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from polyamp.recipe.recipe import Recipe
from polyamp.results import LossFunction, StepResult
from polyamp.rules.batches import micro_batches
from polyamp.rules.weights import WeightFunction
from polyamp.rules.window import Window
from polyamp_torch.arrays import to_device
from polyamp_torch.precision.shield import shield
from polyamp_torch.step import running as buffers
from polyamp_torch.step import together
from polyamp_torch.step.bystanders import Bystanders
from polyamp_torch.step.differentiate import dense, scaled_backward, set_aside
from polyamp_torch.step.interrupts import Undisturbed
from polyamp_torch.step.parameter_writes import settle
from polyamp_torch.step.state import TorchState
from polyamp_torch.step.update import Scaled, applied, nothing_applied
from polyamp_torch.step.weighing import Weighing, divisor, weighing_of
from polyamp_torch.step.window import NARROW, Sums, produced_by, stacked


def train_step(
    loss_fn: LossFunction, recipe: Recipe, state: TorchState, batch: Any, weight: WeightFunction | None = None
) -> StepResult:
    """One step on one state, over `accumulate_steps` micro-batches (S8)."""
    guard = state.replicas.guard
    if guard is not None:
        with guard:
            return _on_this_rank(loss_fn, recipe, state, batch, weight)
    return _on_this_rank(loss_fn, recipe, state, batch, weight)


def _on_this_rank(
    loss_fn: LossFunction, recipe: Recipe, state: TorchState, batch: Any, weight: WeightFunction | None
) -> StepResult:
    parts, window = micro_batches(to_device(batch, state.device, state.plan.param), recipe.accumulate_steps)
    with Undisturbed() as quiet, state.turn, shield():
        weighing = weighing_of(weight, parts, window, state.replicas, state.device)
        return _stepped(loss_fn, state, parts, window, weighing, quiet)


def _stepped(
    loss_fn: LossFunction,
    state: TorchState,
    batches: list[Any],
    window: Window,
    weighing: Weighing,
    quiet: Undisturbed,
) -> StepResult:
    state.check_unchanged()
    if state.replicas.held is not None:
        return together.stepped(loss_fn, state, batches, weighing, quiet)
    parameters = list(state.parameters.values())
    saved = buffers.snapshot(state.buffer_owners)
    before = state.writes.before(loss_fn, training=state.model.training)
    sums = Sums(parameters) if len(batches) > 1 and parameters[0].dtype in NARROW else None
    losses, auxes = [], []
    with set_aside(parameters, used_up=True), Bystanders(parameters, state.graphs) as others:
        try:
            for part in batches:
                loss, aux = scaled_backward(loss_fn, [state], part, others, quiet, weighing, writes=[before])
                losses.append(loss)
                auxes.append(aux)
                if sums is not None:
                    dense(state.parameters.items(), needed=False)
                    sums.take()
            if len(batches) > 1:  # loss_fn may have changed the model between two of them
                state.check_unchanged()
            total = weighing.total
            loss, aux = weighing.mean(losses), stacked(auxes, stack=state.recipe.accumulate_steps > 1)
            counted = weighing.weight(total)
            if isinstance(total, float) and total == 0.0:  # nothing counts, and no backward pass ran
                before.compare()
                settle(saved, before, torch.zeros((), dtype=torch.bool))
                return nothing_applied(state, loss, aux, counted)
            scale = produced_by(state.scale_state.scale if state.scaler.scales else None, divisor(total), state.device)
            if sums is not None:
                assert scale is not None
                sums.give(scale)
                scale = None
            values = dense(state.parameters.items())
            before.compare()
        except BaseException:
            settle(saved, before, torch.zeros((), dtype=torch.bool))
            raise
        ready = Scaled(values, scale, functools.partial(settle, saved, before), weight=counted)
        (result,) = applied([state], [ready], "all")
    return result._replace(loss=loss, aux=aux)

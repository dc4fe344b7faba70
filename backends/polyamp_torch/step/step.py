"""Training step on one state over its micro-batches (S8).

`forward_backward` is the first half, `update` the second. This step unscales and clips gradients in one operation.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from polyamp.recipe.recipe import Recipe
from polyamp.results import LossFunction, StepResult
from polyamp.rules.accumulation import Accumulation
from polyamp.rules.batches import micro_batches
from polyamp.rules.loss_weights import WeightFunction
from polyamp_torch.arrays import HALF_TENSOR_DTYPES, to_device
from polyamp_torch.precision.torch_only.autocast_shield import shield
from polyamp_torch.step import distributed_step
from polyamp_torch.step.accumulation import GradAccumulator, stack_aux, total_scale
from polyamp_torch.step.forward_backward import densify_gradients, scaled_backward, stash_grads
from polyamp_torch.step.loss_weights import LossWeighting, make_loss_weighting, nonzero_total
from polyamp_torch.step.parameter_writes import commit_or_rollback_pass
from polyamp_torch.step.state import TorchState
from polyamp_torch.step.torch_only import buffers
from polyamp_torch.step.torch_only.foreign_grads import ForeignGrads
from polyamp_torch.step.torch_only.interrupts import DeferInterrupts
from polyamp_torch.step.update import UpdateGradients, skipped_step_result, update_states


def train_step(
    loss_fn: LossFunction, recipe: Recipe, state: TorchState, batch: Any, weight: WeightFunction | None = None
) -> StepResult:
    """Run one step on one state, over `accumulate_steps` micro-batches (S8)."""
    guard = state.replicas.guard
    if guard is not None:
        with guard:
            return _train_step_on_rank(loss_fn, recipe, state, batch, weight)
    return _train_step_on_rank(loss_fn, recipe, state, batch, weight)


def _train_step_on_rank(
    loss_fn: LossFunction, recipe: Recipe, state: TorchState, batch: Any, weight: WeightFunction | None
) -> StepResult:
    parts, window = micro_batches(to_device(batch, state.device, state.plan.param), recipe.accumulate_steps)
    with DeferInterrupts() as quiet, state.turn, shield():
        weighing = make_loss_weighting(weight, parts, window, state.replicas, state.device)
        return _train_single_device(loss_fn, state, parts, window, weighing, quiet)


def _train_single_device(
    loss_fn: LossFunction,
    state: TorchState,
    batches: list[Any],
    window: Accumulation,
    weighing: LossWeighting,
    quiet: DeferInterrupts,
) -> StepResult:
    state.check_unchanged()
    if state.replicas.held is not None:
        return distributed_step.distributed_train_step(loss_fn, state, batches, weighing, quiet)
    parameters = list(state.parameters.values())
    saved = buffers.snapshot(state.buffer_owners)
    before = state.writes.before(loss_fn, training=state.model.training)
    sums = GradAccumulator(parameters) if len(batches) > 1 and parameters[0].dtype in HALF_TENSOR_DTYPES else None
    losses, auxes = [], []
    with stash_grads(parameters, used_up=True), ForeignGrads(parameters, state.graphs) as others:
        try:
            for part in batches:
                loss, aux = scaled_backward(loss_fn, [state], part, others, quiet, weighing, writes=[before])
                losses.append(loss)
                auxes.append(aux)
                if sums is not None:
                    densify_gradients(state.parameters.items(), needed=False)
                    sums.take()
            if len(batches) > 1:  # loss_fn may have changed the model between passes
                state.check_unchanged()
            total = weighing.total
            loss, aux = weighing.mean(losses), stack_aux(auxes, stack=state.recipe.accumulate_steps > 1)
            counted = weighing.weight(total)
            if isinstance(total, float) and total == 0.0:  # all weights are 0, and no backward pass ran
                before.compare()
                commit_or_rollback_pass(saved, before, torch.zeros((), dtype=torch.bool))
                return skipped_step_result(state, loss, aux, counted)
            scale = total_scale(
                state.scale_state.scale if state.scaler.scales else None, nonzero_total(total), state.device
            )
            if sums is not None:
                assert scale is not None
                sums.give(scale)
                scale = None
            values = densify_gradients(state.parameters.items())
            before.compare()
        except BaseException:
            commit_or_rollback_pass(saved, before, torch.zeros((), dtype=torch.bool))
            raise
        ready = UpdateGradients(
            values, scale, functools.partial(commit_or_rollback_pass, saved, before), weight=counted
        )
        (result,) = update_states([state], [ready], "all")
    return result._replace(loss=loss, aux=aux)

"""Training step on one state: passes over its micro-batches (S8), then one update (S9).

The step is the same on one device and under a parallel engine, whose single-device form does nothing:

- Gradients are reduced over the replicas after the last pass of the accumulation.
- One small all-reduce then combines norm, flag and loss, so every process decides by the same bits. If all processes
  have the same gradients, it combines the loss only, and starts before the last backward pass.
- Running statistics are rank 0's, broadcast once at the end of the step; its parameter writes, before the update.
"""

from __future__ import annotations

from typing import Any

import torch

from polyamp.monitor.slots import MonitorSelection
from polyamp.recipe.recipe import Recipe
from polyamp.results import LossFunction, StepResult
from polyamp.rules.batches import micro_batches
from polyamp.rules.loss_weights import WeightFunction
from polyamp_torch.arrays import can_read_without_sync, to_device
from polyamp_torch.compat import NULL_CONTEXT
from polyamp_torch.precision.torch_only.autocast_region_stack import shield
from polyamp_torch.step.accumulation import accumulate_gradients
from polyamp_torch.step.forward_backward import PassSnapshot, densify_gradients, stash_grads
from polyamp_torch.step.loss_weights import LossWeighting, make_loss_weighting
from polyamp_torch.step.state import TorchState
from polyamp_torch.step.torch_only.critical_section import DeferInterrupts
from polyamp_torch.step.torch_only.foreign_grads import ForeignGrads
from polyamp_torch.step.torch_only.product_figures import PassWatch
from polyamp_torch.step.update import StepReduction, UpdateGradients, skipped_step_result, update_states


def train_step(
    loss_fn: LossFunction,
    recipe: Recipe,
    weight: WeightFunction | None,
    monitor: MonitorSelection | None,
    state: TorchState,
    batch: Any,
) -> tuple[TorchState, StepResult]:
    """Run one step on one state, over `accumulate_steps` micro-batches (S8)."""
    with state.replicas.guard or NULL_CONTEXT:
        parts, window = micro_batches(to_device(batch, state.device, state.plan.param), recipe.accumulate_steps)
        with DeferInterrupts() as interrupts, state.lock, shield():
            weighting = make_loss_weighting(weight, parts, window, state.replicas, state.device)
            state.check_unchanged()
            return state, _train_micro_batches(loss_fn, state, parts, weighting, interrupts, monitor)


def _train_micro_batches(
    loss_fn: LossFunction,
    state: TorchState,
    parts: list[Any],
    weighting: LossWeighting,
    interrupts: DeferInterrupts,
    monitor: MonitorSelection | None,
) -> StepResult:
    engine, slots = state.replicas.engine, state.buffer_owners.slots
    parameters = list(state.parameters.values())
    snapshot = PassSnapshot(state, loss_fn)
    versions = engine.buffer_versions(slots)
    reduction = StepReduction(weighting)
    watches = monitor is not None and bool(monitor.activations or monitor.products)
    figures = PassWatch(state, monitor) if monitor is not None and watches else None
    with stash_grads(parameters, used_up=True), ForeignGrads(parameters, state.graphs, engine.leaves) as foreign:
        try:
            reduction.loss, aux = accumulate_gradients(
                loss_fn, state, parts, snapshot, reduction, foreign, interrupts, figures
            )
            if weighting.is_empty:  # no backward pass ran
                snapshot.parameters.compare()
                snapshot.undo()
                result = skipped_step_result(state, reduction.loss, aux, weighting.weight(0.0), monitor)
                return result if figures is None else figures.with_figures(result)
            values = densify_gradients(state.parameters.items())
            snapshot.parameters.compare()
        except BaseException:
            snapshot.undo()
            raise

        def settle(finite: torch.Tensor | None) -> None:
            snapshot.settle(finite)
            if finite is None or not can_read_without_sync(finite.device) or bool(finite):
                engine.broadcast_buffers(slots, versions)

        scale = state.scale_state.scale if state.scales else None
        ready = UpdateGradients(values, scale, settle, reduction=reduction, written=snapshot.parameters)
        (result,) = update_states([state], [ready], "all", monitor)
    result = result._replace(loss=reduction.loss, aux=aux)
    return result if figures is None else figures.with_figures(result)

"""Distributed training step for DDP, FSDP2 and tensor parallelism (S9), in the order of `step`.

- Gradients are reduced over the replicas after the last pass of the accumulation.
- One small all-reduce then combines norm, flag and loss, so every process decides by the same bits. If all processes
  have the same gradients, it combines the loss only, and starts before the last backward pass.
- Running statistics are rank 0's, broadcast once at the end of the step.
- Parameter writes of the passes are rank 0's too, broadcast before the update.
"""

from __future__ import annotations

from typing import Any

import torch

from polyamp.results import LossFunction, StepResult
from polyamp_torch.arrays import HALF_TENSOR_DTYPES
from polyamp_torch.step import parameter_writes
from polyamp_torch.step.accumulation import GradAccumulator, stack_aux
from polyamp_torch.step.forward_backward import densify_gradients, scaled_backward, stash_grads
from polyamp_torch.step.grad_stats import can_read_without_sync
from polyamp_torch.step.loss_weights import LossWeighting, weighted_loss_sum
from polyamp_torch.step.parameter_writes import ParameterSnapshot
from polyamp_torch.step.replicas import MicroBatchPass
from polyamp_torch.step.state import TorchState
from polyamp_torch.step.torch_only import buffers
from polyamp_torch.step.torch_only.foreign_grads import ForeignGrads
from polyamp_torch.step.torch_only.interrupts import DeferInterrupts
from polyamp_torch.step.torch_only.rank_zero_writes import has_unannounced_writes
from polyamp_torch.step.update import StepReduction, UpdateGradients, update_states


def distributed_train_step(
    loss_fn: LossFunction, state: TorchState, batches: list[Any], weighing: LossWeighting, quiet: DeferInterrupts
) -> StepResult:
    """Run one step on one state, whose model is unchanged since `init`."""
    held, count = state.replicas.held, state.recipe.accumulate_steps
    assert held is not None
    parameters = list(state.parameters.values())
    narrow = count > 1 and parameters[0].dtype in HALF_TENSOR_DTYPES
    passes = state.replicas.passes(batches, count, narrow=narrow)
    weighing.rest = [(one.part, one.counts) for one in passes[1:]]
    saved = buffers.snapshot(state.buffer_owners)
    before_pass = state.writes.before(loss_fn, training=state.model.training)
    slots = [owner.slots for owner in state.buffer_owners]
    before = held.written(slots)
    sums = GradAccumulator(parameters) if narrow else None
    shared = StepReduction(weighing, divided=float(count) if narrow else 1.0)
    with stash_grads(parameters, used_up=True), ForeignGrads(parameters, state.graphs, held.leaves) as others:
        try:
            with held.window():
                losses, auxes = _run_passes(loss_fn, state, passes, shared, sums, others, quiet, before_pass)
            if len(passes) > 1:  # loss_fn may have changed the model between passes
                state.check_unchanged()
            scale = state.scale_state.scale if state.scaler.scales else None
            if sums is not None:
                assert scale is None  # 16-bit parameters have no loss scale
                sums.give(torch.full((), shared.divided))
            values = densify_gradients(state.parameters.items())
            shared.loss, aux = weighted_loss_sum(losses, weighing.factors), stack_aux(auxes, stack=count > 1)
            before_pass.compare()
        except BaseException:
            parameter_writes.commit_or_rollback_pass(saved, before_pass, torch.zeros((), dtype=torch.bool))
            raise

        def settle(finite: torch.Tensor | None) -> None:
            parameter_writes.commit_or_rollback_pass(saved, before_pass, finite)
            if finite is None or not can_read_without_sync(finite.device) or bool(finite):
                held.send_running(slots, before)

        (result,) = update_states(
            [state], [UpdateGradients(values, scale, settle, shared=shared, written=before_pass)], "all"
        )
    return result._replace(loss=shared.loss, aux=aux)


def _run_passes(
    loss_fn: LossFunction,
    state: TorchState,
    passes: list[MicroBatchPass],
    shared: StepReduction,
    sums: GradAccumulator | None,
    others: ForeignGrads,
    quiet: DeferInterrupts,
    before: ParameterSnapshot,
) -> tuple[list[torch.Tensor], list[Any]]:
    """Run all passes; return the losses, and the aux of the passes that count.

    The gradients are then in the parameters or in `sums`."""
    held = state.replicas.held
    assert held is not None
    losses: list[torch.Tensor] = []
    auxes = []

    def begin(loss: torch.Tensor) -> None:
        """Start the reduction before the last backward pass, so that it precedes that pass's own on every rank."""
        weighing = shared.weighing
        if state.replicas.several:
            shared.announced = has_unannounced_writes(state, before.so_far(state.bound.written()))
        mean = weighted_loss_sum([*losses, loss], weighing.factors)
        shared.begun = state.replicas.begin(mean, weighing.total, news=shared.announced)

    for number, one in enumerate(passes, 1):
        between = begin if number == len(passes) else None
        saved = None if one.counts else buffers.snapshot(state.buffer_owners)
        own = before if one.counts else state.writes.before(loss_fn, training=state.model.training)
        with held.one_pass(last=one.last):
            loss, aux = scaled_backward(
                loss_fn, [state], one.part, others, quiet, shared.weighing, between, [own], counts=one.counts
            )
        losses.append(loss)
        if saved is None:
            auxes.append(aux)
        else:
            own.compare()
            parameter_writes.commit_or_rollback_pass(saved, own, torch.zeros((), dtype=torch.bool))
        if sums is not None:
            state.replicas.fit(state.parameters)
            densify_gradients(state.parameters.items(), needed=False)
            sums.take()
    if sums is None:
        state.replicas.fit(state.parameters)
    return losses, auxes

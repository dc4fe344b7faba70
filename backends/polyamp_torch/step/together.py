"""The step of a model that several processes train together (S9), in the order of `step`.

Gradients are reduced over the replicas behind the last pass of the window; then norm, flag and loss are, in one small
reduction, and every process decides by the same bits. Where all have the same gradients then, that reduction is of the
loss alone and goes its way before the last backward pass. Running statistics are rank 0's, sent once when the step is
through, and so is what passes wrote to parameters, sent before the update. Called by the step.
"""

from __future__ import annotations

from typing import Any

import torch

from polyamp.results import LossFunction, StepResult
from polyamp_torch.step import parameter_writes
from polyamp_torch.step import running as buffers
from polyamp_torch.step.bystanders import Bystanders
from polyamp_torch.step.differentiate import dense, scaled_backward, set_aside
from polyamp_torch.step.interrupts import Undisturbed
from polyamp_torch.step.measure import looks
from polyamp_torch.step.parameter_writes import BeforePass
from polyamp_torch.step.rank_0_writes import news
from polyamp_torch.step.replicas import Pass
from polyamp_torch.step.state import TorchState
from polyamp_torch.step.update import Scaled, Shared, applied
from polyamp_torch.step.weighing import Weighing, weighed
from polyamp_torch.step.window import NARROW, Sums, stacked


def stepped(
    loss_fn: LossFunction, state: TorchState, batches: list[Any], weighing: Weighing, quiet: Undisturbed
) -> StepResult:
    """One step on one state, which is found as it was at `init`."""
    held, count = state.replicas.held, state.recipe.accumulate_steps
    assert held is not None
    parameters = list(state.parameters.values())
    narrow = count > 1 and parameters[0].dtype in NARROW
    passes = state.replicas.passes(batches, count, narrow=narrow)
    weighing.rest = [(one.part, one.counts) for one in passes[1:]]
    saved = buffers.snapshot(state.buffer_owners)
    before_pass = state.writes.before(loss_fn, training=state.model.training)
    slots = [owner.slots for owner in state.buffer_owners]
    before = held.written(slots)
    sums = Sums(parameters) if narrow else None
    shared = Shared(weighing, divided=float(count) if narrow else 1.0)
    with set_aside(parameters, used_up=True), Bystanders(parameters, state.graphs, held.leaves) as others:
        try:
            with held.window():
                losses, auxes = _passed(loss_fn, state, passes, shared, sums, others, quiet, before_pass)
            if len(passes) > 1:  # loss_fn may have changed the model between two of them
                state.check_unchanged()
            scale = state.scale_state.scale if state.scaler.scales else None
            if sums is not None:
                assert scale is None  # parameters of 16 bits have no loss scale
                sums.give(torch.full((), shared.divided))
            values = dense(state.parameters.items())
            shared.loss, aux = weighed(losses, weighing.factors), stacked(auxes, stack=count > 1)
            before_pass.compare()
        except BaseException:
            parameter_writes.settle(saved, before_pass, torch.zeros((), dtype=torch.bool))
            raise

        def settle(finite: torch.Tensor | None) -> None:
            parameter_writes.settle(saved, before_pass, finite)
            if finite is None or not looks(finite.device) or bool(finite):
                held.send_running(slots, before)

        (result,) = applied([state], [Scaled(values, scale, settle, shared=shared, written=before_pass)], "all")
    return result._replace(loss=shared.loss, aux=aux)


def _passed(
    loss_fn: LossFunction,
    state: TorchState,
    passes: list[Pass],
    shared: Shared,
    sums: Sums | None,
    others: Bystanders,
    quiet: Undisturbed,
    before: BeforePass,
) -> tuple[list[torch.Tensor], list[Any]]:
    """Every pass of a window: the losses, and the aux of those that count; the gradients are in the parameters or
    `sums`."""
    held = state.replicas.held
    assert held is not None
    losses: list[torch.Tensor] = []
    auxes = []

    def begin(loss: torch.Tensor) -> None:
        """Before the last backward pass, so that on every rank it comes before what that one sends."""
        weighing = shared.weighing
        if state.replicas.several:
            shared.announced = news(state, before.so_far(state.bound.written()))
        mean = weighed([*losses, loss], weighing.factors)
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
            parameter_writes.settle(saved, own, torch.zeros((), dtype=torch.bool))
        if sums is not None:
            state.replicas.fit(state.parameters)
            dense(state.parameters.items(), needed=False)
            sums.take()
    if sums is None:
        state.replicas.fit(state.parameters)
    return losses, auxes

"""Second half of a training step: finite flag, unscaling, clipping, optimizer and scale update (S9 to S15), in place.

With an accelerator, this module reads no value on the host. There are two exceptions elsewhere:
`optimizers.apply_optimizer` for optimizers without another way, and `buffers.commit_or_rollback` for resized or
replaced buffers. On the CPU reading is free, so the flag is read and a skipped step changes nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from polyamp.array_namespace import PYTHON
from polyamp.errors import GradientError, UnsupportedError
from polyamp.recipe.scaler import LossScaleState
from polyamp.results import Gradients, StepResult
from polyamp.rules import step_checks
from polyamp.rules.update_decision import GradStats, Skip, UpdateDecision, decide
from polyamp_torch.arrays import XP, can_read_without_sync
from polyamp_torch.compat import NULL_CONTEXT, local_tensor_of
from polyamp_torch.distributed.replicas import guard_states
from polyamp_torch.precision.torch_only.autocast_region_stack import shield
from polyamp_torch.step import optimizers
from polyamp_torch.step.forward_backward import NamedGradients, stash_grads
from polyamp_torch.step.grad_stats import (
    divide_gradients_,
    global_norm_and_finite,
    unscale_and_clip_divisor,
    unscale_then_clip_,
)
from polyamp_torch.step.loss_weights import LossWeighting, nonzero_total, total_scale, weighted_loss_sum
from polyamp_torch.step.monitor_slots import MonitoredUpdate
from polyamp_torch.step.parameter_writes import GradientWrites, ParameterWrites
from polyamp_torch.step.state import TorchState
from polyamp_torch.step.torch_only import buffers, late_groups
from polyamp_torch.step.torch_only.critical_section import DeferInterrupts, acquire_all
from polyamp_torch.step.torch_only.gradient_clip import SAFE_SCALE_RANGE, clip_sets_, transform_gradients_
from polyamp_torch.step.torch_only.parameter_write_broadcast import broadcast_writes, has_unannounced_writes
from polyamp_torch.step.torch_only.replica_norms import LocalStepScalars, reduce_step_scalars

if TYPE_CHECKING:
    from polyamp.monitor.slots import MonitorSelection
    from polyamp_torch.distributed.all_reduce import AsyncStepScalars


class StepReduction:
    """The losses and weights of a step, and their part of the step's single all-reduce.

    Args:
        weighting: the weights of the micro-batches.

    Attributes:
        loss: weighted sum of the losses of this process's micro-batches; after the update the mean over the replicas.
        weight: set by the update; see `StepResult.weight`.
        started: the asynchronous reduction of the loss if it has started, or None.
        announced: whether that reduction announces parameter writes.
    """

    def __init__(self, weighting: LossWeighting) -> None:
        self.weighting = weighting
        self.loss: torch.Tensor | None = None
        self.weight: torch.Tensor | None = None
        self.started: AsyncStepScalars | None = None
        self.announced = False
        self._divided: Any = 1.0

    def start(self, state: TorchState, losses: Sequence[torch.Tensor], *, announced: bool) -> None:
        """Start the reduction before the last backward pass, if gradients need no further one."""
        loss = weighted_loss_sum(losses, self.weighting.factors)
        self.announced = announced
        self.started = state.replicas.start_reduction(loss, self.weighting.total, announced=announced)

    def divide(self, state: TorchState, count: int) -> torch.Tensor:
        """Return the divisor for the float32 sums of 16-bit gradients, which are rounded once.

        Alone it is the sum of the weights; several processes know that only after their reduction, and divide by the
        number of micro-batches first."""
        self._divided = float(count) if state.replicas.several else nonzero_total(self.weighting.total)
        return torch.as_tensor(self._divided, dtype=torch.float64, device=state.device)

    def finish_alone(self, scale: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
        """Finish the reduction for a single process; return the remaining scale of the gradients."""
        total = self.weighting.total
        if isinstance(total, float) and total == self._divided == 1.0:
            self.weight = self.weighting.weight(total)
            return scale
        divisor = nonzero_total(total)
        if self.loss is not None and not (isinstance(divisor, float) and divisor == 1.0):
            self.loss = self.loss / divisor
        self.weight = self.weighting.weight(total)
        return total_scale(scale, divisor / self._divided, device)

    def local_scalars(self) -> LocalStepScalars:
        """Return this process's scalars for the all-reduce."""
        return LocalStepScalars(self.loss, self.weighting.total, self._divided, self.announced)


class UpdateGradients(NamedTuple):
    """Gradients and related values for an update.

    Attributes:
        values: one gradient per parameter that has one, in the parameters' order.
        scale: scalar that the gradients still carry, or None.
        settle: commits or rolls back the buffers, depending on the flag.
        reduction: the step's losses and weights; None for gradients of an earlier call.
        weight: total weight of the mean loss of an earlier call, float32 scalar, if it may be 0 (S8); else None.
        places: parameters whose `.grad` must be set; the gradients belong to the caller and are not overwritten. None
            if the gradients are already in `.grad` and not shared.
        written: parameter writes of the passes, which may differ between processes.
    """

    values: list[torch.Tensor]
    scale: torch.Tensor | None
    settle: Callable[[torch.Tensor | None], None]
    places: list[torch.Tensor] | None = None
    reduction: StepReduction | None = None
    weight: torch.Tensor | None = None
    written: ParameterWrites | None = None


def apply_gradients(states: Sequence[TorchState], grads: Sequence[Gradients], skip: Skip) -> list[StepResult]:
    """Apply gradients in place: finite flag, clipping, optimizer and one scale update (S9 to S15).

    A gradient of None leaves its parameter and its optimizer state unchanged. The optimizer of each state steps a
    shared parameter, like torch's optimizers over one `.grad`."""
    with guard_states(states, second=True), DeferInterrupts(), acquire_all([state.lock for state in states]), shield():
        return _apply_gradients(states, grads, skip)


def _apply_gradients(states: Sequence[TorchState], grads: Sequence[Gradients], skip: Skip) -> list[StepResult]:
    ready: list[UpdateGradients] = []
    written: list[GradientWrites] = []
    for state, item in zip(states, grads, strict=True):
        state.check_unchanged()
        _check_gradients_fit(state, item.values)
        fitted = _fit_gradients(state, item.values)
        places: list[torch.Tensor] = [state.parameters[name] for name in fitted]
        written.append(GradientWrites(state.writes.named, item.running))
        settle = functools.partial(_commit_buffers_and_writes, state, item.running, written[-1])
        ready.append(
            UpdateGradients(list(fitted.values()), None, settle, places, weight=item.weight, written=written[-1])
        )
    parameters = {id(p): p for state in states for p in state.parameters.values()}
    try:
        with stash_grads(list(parameters.values()), used_up=True):
            return update_states(states, ready, skip)
    except BaseException:
        for each in reversed(written):
            each.settle(torch.zeros((), dtype=torch.bool))
        raise


def _commit_buffers_and_writes(
    state: TorchState, running: buffers.BufferChanges, written: GradientWrites, finite: torch.Tensor | None
) -> None:
    """Commit the running statistics of the gradients to the model, rank 0's on every rank."""
    written.settle(finite)
    statistics = {name: value for name, value in running.items() if name not in written}
    buffers.commit_buffers(state.buffer_owners, statistics, finite)
    if running and (finite is None or not can_read_without_sync(finite.device) or bool(finite)):
        state.replicas.engine.broadcast_buffers(state.buffer_owners.slots, None)


@torch.no_grad()
def update_states(
    states: Sequence[TorchState],
    grads: Sequence[UpdateGradients],
    skip: Skip,
    monitor: MonitorSelection | None = None,
) -> list[StepResult]:
    """Update states that step together: measure all, then decide and commit one by one."""
    ready: list[tuple[TorchState, UpdateGradients, _MeasuredGradients]] = []
    flags: list[torch.Tensor] = []
    for state, given in zip(states, grads, strict=True):
        own = given
        if state.groups.starts:  # zeros are no part of norm and flag (S27)
            parameters, free = _parameters_with_gradients(state, given), given.places is None
            zeroed = late_groups.zero_waiting_gradients(state, parameters, given.values, own=free)
            own = given._replace(values=zeroed)
        found = _measure_gradients(state, own)
        ready.append((state, own, found))
        flags.append(found.stats.finite)
    results = []
    for state, item, found in ready:
        decision = _decide(state, found.stats, flags, skip)
        watch = None if monitor is None else _watch_update(state, monitor, item, found.scale)
        _update(state, item, found, decision.finite)
        item.settle(decision.finite)
        state.scale_state, state.step = decision.scale_state, decision.step
        if state.averages is not None:
            state.averages.move(state, decision.finite)
        result = decision.result(found.stats)
        results.append(result if watch is None else result._replace(monitor=watch.finish(state)))
    torch.clear_autocast_cache()  # a caller's open region would serve the old weights to the next step
    return results


def _watch_update(
    state: TorchState, monitor: MonitorSelection, grads: UpdateGradients, scale: torch.Tensor | None
) -> MonitoredUpdate:
    """Measure the gradients of an update for a monitor, before the update overwrites them."""
    watch = MonitoredUpdate(state, monitor)
    names = {id(p): name for name, p in state.parameters.items()}
    parameters = _parameters_with_gradients(state, grads)
    watch.measure({names[id(p)]: value for p, value in zip(parameters, grads.values, strict=True)}, scale)
    return watch


def skipped_step_result(
    state: TorchState,
    loss: torch.Tensor,
    aux: Any,
    weight: torch.Tensor | None,
    monitor: MonitorSelection | None = None,
) -> StepResult:
    """Return the result of a step whose weights are all 0: it is skipped, and does not affect the scale (S8)."""
    zero = torch.zeros_like(loss)
    stats = GradStats(zero, torch.ones((), dtype=torch.bool, device=state.device), zero)
    slots = None
    if monitor is not None:
        watch = MonitoredUpdate(state, monitor)
        watch.measure({}, None)
        slots = watch.finish(state)
    decision = _decide(state, stats, [stats.finite], "all")
    state.scale_state = decision.scale_state
    return decision.result(stats)._replace(loss=loss, aux=aux, weight=weight, monitor=slots)


class _MeasuredGradients(NamedTuple):
    """One state's gradients, measured.

    Attributes:
        stats: what the decision needs.
        norm: the float64 norm.
        values: the gradients as kernels need them (`TorchState.plain`).
        by: the divisor that unscales and clips, float64 scalar, or None.
        scale: the scale that the gradients still carry, or None.
    """

    stats: GradStats
    norm: torch.Tensor
    values: list[torch.Tensor]
    by: torch.Tensor | None
    scale: torch.Tensor | None


def _measure_gradients(state: TorchState, grads: UpdateGradients) -> _MeasuredGradients:
    """Measure one state's gradients, over all replicas.

    Off the CPU, gradients count as not finite if the divisor leaves float32: above 3.4e38 * clip_norm before unscaling.
    """
    how, scale, reduction = state.common_clip, grads.scale, grads.reduction
    values = state.plain(grads.values)
    if state.replicas.several:
        norm, finite, scale = _all_reduce_grad_stats(state, grads, values)
        weight = grads.weight if reduction is None else reduction.weight
    else:
        if reduction is not None:
            scale = reduction.finish_alone(scale, state.device)
        weight = grads.weight if reduction is None else reduction.weight
        least = state.scaler.min_scale if weight is None else 0.0
        norm, finite = global_norm_and_finite(values, scale, least=least, alike=state.one_device)
    by = unscale_and_clip_divisor(norm, scale, how)
    if by is not None and how.factor is not None and not can_read_without_sync(norm.device):
        finite = finite & torch.isfinite(by.float())
    return _MeasuredGradients(GradStats(norm.float(), finite, weight), norm, values, by, scale)


def _decide(state: TorchState, stats: GradStats, flags: Sequence[torch.Tensor], skip: Skip) -> UpdateDecision:
    """Return the decision on the state's device; on the CPU by NumPy's scalars, which are faster than tensors."""
    scaler, before, step, here = state.scaler, state.scale_state, state.step, state.device
    if not scaler.checks and stats.weight is None:
        return decide(scaler, before, step, stats, flags, skip, XP)
    if not can_read_without_sync(here):
        weight = None if stats.weight is None else stats.weight.to(here)
        own = GradStats(stats.norm, stats.finite.to(here), weight)
        return decide(scaler, before, step, own, [flag.to(here) for flag in flags], skip, XP)
    weight = None if stats.weight is None else stats.weight.numpy()[()]
    own = GradStats(stats.norm, stats.finite.numpy()[()], weight)
    numbers = LossScaleState(*[field.numpy()[()] for field in before])
    made = decide(scaler, numbers, step.numpy()[()], own, [flag.numpy()[()] for flag in flags], skip, PYTHON)
    after = zip(made.scale_state, before, strict=True)
    return UpdateDecision(
        torch.scalar_tensor(made.finite, dtype=torch.bool),
        LossScaleState(*[torch.scalar_tensor(new.item(), dtype=old.dtype) for new, old in after]),
        torch.scalar_tensor(made.step, dtype=torch.int32),
        torch.scalar_tensor(made.skipped, dtype=torch.bool),
    )


def _update(
    state: TorchState, grads: UpdateGradients, measured: _MeasuredGradients, finite: torch.Tensor | None
) -> None:
    """Unscale, clip and step; on the CPU do nothing if the flag is false."""
    by, number = measured.by, None  # `number` is the divisor where the host can read it
    if can_read_without_sync(state.device):
        if finite is not None and not bool(finite):
            return
        number = None if by is None else by.item()
    if number == 1.0:
        by = None
    values, (_, transformation, apart) = grads.values, state.common_clip
    if grads.places is not None:
        if by is not None or transformation is not None or apart:
            values = [torch.empty_like(p).copy_(value) for p, value in zip(grads.places, values, strict=True)]
        for p, value in zip(grads.places, values, strict=True):
            p.grad = value
    shards, starts = state.shards, bool(state.groups.starts)
    parameters = _parameters_with_gradients(state, grads) if starts or apart or shards is not None else []
    waiting = late_groups.waiting_parameters(state) if starts else ()
    if waiting:
        values = [value for p, value in zip(parameters, values, strict=True) if id(p) not in waiting]
        for p in parameters:
            p.grad = None if id(p) in waiting else p.grad
        parameters = [p for p in parameters if id(p) not in waiting]
    values = measured.values if values is grads.values else state.plain(values)
    if by is not None:
        by = _divide_unless_fused(state, values, measured, by, number)
    if transformation is not None:
        transform_gradients_(values, transformation, alike=state.one_device)
    elif apart:
        clip_sets_(state, parameters, values)
    trains = late_groups.group_flags(state) if starts else None
    with NULL_CONTEXT if shards is None else shards.inside(state.optimizer, parameters, values):
        optimizers.apply_optimizer(
            state.optimizer,
            state.recipe.optimizer,
            state.step,
            finite,
            by=by,
            grads=values,
            kernels=state.kernels,
            rates=state.rates,
            groups=state.groups,
            trains=trains,
        )
    for p in grads.places or ():  # another state may share the parameter, with a differently clipped gradient
        p.grad = None


def _parameters_with_gradients(state: TorchState, grads: UpdateGradients) -> list[torch.Tensor]:
    """Return the parameters that have gradients, in order."""
    return grads.places or [p for p in state.parameters.values() if p.grad is not None]


def _all_reduce_grad_stats(
    state: TorchState, grads: UpdateGradients, values: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return norm and flag over all processes, and the remaining scale of the gradients.

    Sets mean loss and weight in `grads.reduction`. Parameter writes become rank 0's."""
    replicas, reduction = state.replicas, grads.reduction
    parameters = _parameters_with_gradients(state, grads)
    started = None if reduction is None else reduction.started
    if reduction is not None and started is not None:
        announced = reduction.announced
    else:
        announced = grads.written is not None and has_unannounced_writes(state, grads.written.found)
    own = LocalStepScalars() if reduction is None else reduction.local_scalars()
    own = own._replace(announced=announced)
    found = reduce_step_scalars(replicas, parameters, values, grads.scale, own, started, alike=state.one_device)
    if reduction is not None:
        reduction.loss = found.loss
        reduction.weight = reduction.weighting.weight(found.total * replicas.count)
    if grads.written is not None:
        try:
            broadcast_writes(state, grads.written, found.announcements, announced=announced, finite=found.finite)
        except UnsupportedError:
            with contextlib.suppress(UnsupportedError):  # a missing old value: the original error explains it
                grads.settle(torch.zeros((), dtype=torch.bool))
            raise
    return found.norm, found.finite, found.scale


def _divide_unless_fused(
    state: TorchState,
    values: list[torch.Tensor],
    measured: _MeasuredGradients,
    by: torch.Tensor,
    number: float | None,
) -> torch.Tensor | None:
    """Divide the gradients unless the optimizer's kernels can; return the remaining divisor."""
    factor, transformation, apart = state.common_clip
    if factor is not None and number is not None and not SAFE_SCALE_RANGE[0] < number < SAFE_SCALE_RANGE[1]:
        unscale_then_clip_(values, measured.scale, factor(measured.norm, xp=XP))
        return None
    if optimizers.has_grad_scale(state.optimizer) and transformation is None and not apart:
        return by.float()
    divide_gradients_(values, by, alike=state.one_device)
    return None


def _fit_gradients(state: TorchState, values: NamedGradients) -> dict[str, torch.Tensor]:
    """Return the user's gradients in the parameters' order, dtype and strides, without those that are None."""
    fitted, has_complex = {}, bool(state.complex_parameters)
    for name, parameter in state.parameters.items():
        value = values[name]
        if value is None:
            continue
        if (local_tensor_of(value) is value) != (local_tensor_of(parameter) is parameter):
            raise GradientError(
                f"the gradient of {name!r} must be sharded as the parameter is. Received: "
                f"{'a whole tensor for a sharded parameter' if local_tensor_of(value) is value else 'a sharded tensor'}"
                ". torch.distributed.tensor.distribute_tensor(gradient, parameter.device_mesh, parameter.placements) "
                "makes one."
            )
        if value.dtype != parameter.dtype and value.is_complex() and not parameter.is_complex():
            raise GradientError(
                f"the gradient of {name!r} must be real as the parameter is. Received: {value.dtype}. Give its real "
                "part, gradient.real, if that is what is meant."
            )
        conjugate = has_complex and value.is_conj()
        if conjugate or value.dtype != parameter.dtype or value.stride() != parameter.stride():
            value = torch.empty_like(parameter).copy_(value)
        fitted[name] = value.detach()
    return fitted


def _check_gradients_fit(state: TorchState, values: NamedGradients) -> None:
    """Raise if the gradients do not match the parameters."""
    step_checks.check_gradients(
        [(name, tuple(p.shape)) for name, p in state.parameters.items()],
        [(name, None if value is None else tuple(value.shape)) for name, value in values.items()],
    )

"""The torch step: scaled gradients, norm and flag, unscale and clip, optimizer, scale adjustment (S6 to S15).

`value_and_grad` is the first half, `apply_gradients` the second. `train_step` is both on one state, and unscales and
clips in one go. Nothing here reads a value on the host of an accelerator; `optimizers.apply` does for the optimizers
that must, and `buffers.settle` for buffers that were replaced. On the CPU, where reading costs nothing, the flag is
read and a skipped step touches nothing.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch

from polyamp.arrays import PYTHON
from polyamp.errors import LossError, UnsupportedError
from polyamp.recipe.recipe import Recipe
from polyamp.results import Gradients, LossFunction, StepResult
from polyamp.rules import clip, refusals
from polyamp.rules.batches import micro_batches
from polyamp.rules.decide import Skip
from polyamp.rules.scale import LossScaleState, update
from polyamp.trees import map_tree
from polyamp_torch.arrays import XP, dtype_name, to_device
from polyamp_torch.compat import foreach_mul_
from polyamp_torch.precision.autocast import autocast, matmul_precision
from polyamp_torch.step import optimizers
from polyamp_torch.step import running as buffers
from polyamp_torch.step.bystanders import Bystanders, Graphs, made
from polyamp_torch.step.interrupts import Undisturbed
from polyamp_torch.step.measure import (
    Measured,
    divide_,
    divide_in_two_steps_,
    divisor,
    looks,
    measured,
    reciprocal,
)
from polyamp_torch.step.measure import buckets as bucketed
from polyamp_torch.step.state import TorchState
from polyamp_torch.step.turns import together
from polyamp_torch.step.window import NARROW, Sums, mean_and_stack, produced_by

Values = dict[str, torch.Tensor | None]
_ORDINARY: Final = (2.0**-100, 2.0**100)
"""Divisors whose quotients are as exact as float32 allows."""
_LAYOUT: Final = operator.attrgetter("layout")
_STRIDED: Final = {torch.strided}


class Scaled(NamedTuple):
    """Gradients on their way into an update.

    Attributes:
        values: one per parameter that has one, in the parameters' order.
        scale: scalar that they are still multiplied by, or None.
        places: the parameters into whose `.grad` they are still to be put; they are the caller's then, and not to be
            overwritten. None for gradients that stand there, and that nobody else has.
    """

    values: list[torch.Tensor]
    scale: torch.Tensor | None
    places: list[torch.Tensor] | None = None


def train_step(loss_fn: LossFunction, recipe: Recipe, state: TorchState, batch: Any) -> StepResult:
    """One step on one state, over `accumulate_steps` micro-batches (S8)."""
    batches = micro_batches(to_device(batch, state.device, recipe.policy.param), recipe.accumulate_steps)
    with Undisturbed() as quiet, state.turn:
        return _stepped(loss_fn, state, batches, quiet)


def _stepped(loss_fn: LossFunction, state: TorchState, batches: list[Any], quiet: Undisturbed) -> StepResult:
    parameters = list(state.parameters.values())
    saved = buffers.snapshot(state.buffer_owners)
    sums = Sums(parameters) if len(batches) > 1 and parameters[0].dtype in NARROW else None
    losses, auxes = [], []
    with set_aside(parameters, used_up=True), Bystanders(parameters, state.graphs) as others:
        try:
            for part in batches:
                loss, aux = scaled_backward(loss_fn, [state], part, others, quiet)
                losses.append(loss)
                auxes.append(aux)
                if sums is not None:
                    _dense(state.parameters.items(), needed=False)
                    sums.take()
            scale = produced_by(state.scale_state.scale if state.scaler.scales else None, len(batches), state.device)
            if sums is not None:
                assert scale is not None
                sums.give(scale)
                scale = None
            values = _dense(state.parameters.items())
            loss, aux = mean_and_stack(losses, auxes)
        except BaseException:
            buffers.settle(saved, torch.zeros((), dtype=torch.bool))
            raise
        settle = functools.partial(buffers.settle, saved)
        (result,) = _applied([state], [Scaled(values, scale)], "all", [settle])
    return result._replace(loss=loss, aux=aux)


@contextlib.contextmanager
def set_aside(parameters: Sequence[torch.Tensor], *, used_up: bool = False) -> Iterator[None]:
    """A block at whose start every `.grad` is None, and after which they are what they were.

    `torch.autograd.grad` would be shorter, but its gradients may share memory with each other and be laid out unlike
    their parameters, which in-place division and the fused kernels cannot take; `.grad` keeps torch's layout contract.

    Args:
        parameters: whose gradients.
        used_up: leave None behind instead, unless the block fails.
    """
    held = [p.grad for p in parameters]
    if any(grad is not None for grad in held):
        for p in parameters:
            p.grad = None
    try:
        yield
    except BaseException:
        used_up = False
        raise
    finally:
        for p, old in zip(parameters, held, strict=True):
            p.grad = None if used_up else old


def value_and_grad(loss_fn: LossFunction, states: Sequence[TorchState], batch: Any) -> tuple[Any, list[Gradients]]:
    """The value of `loss_fn` and the unscaled gradients of each state; the states stay as they are.

    A parameter that several states share is in each of their `Gradients`, with the same tensor.
    """
    batch = to_device(batch, states[0].device, states[0].recipe.policy.param)
    with Undisturbed() as quiet, together([state.turn for state in states]):
        return _differentiated(loss_fn, states, batch, quiet)


def _differentiated(
    loss_fn: LossFunction, states: Sequence[TorchState], batch: Any, quiet: Undisturbed
) -> tuple[Any, list[Gradients]]:
    saved = [buffers.snapshot(state.buffer_owners) for state in states]
    named = list({id(p): (name, p) for state in states for name, p in state.parameters.items()}.values())
    parameters = [p for _, p in named]
    graphs = states[0].graphs if len(states) == 1 else Graphs()
    try:
        with set_aside(parameters), Bystanders(parameters, graphs) as others:
            loss, aux = scaled_backward(loss_fn, states, batch, others, quiet)
            values = _dense(named)
            found: list[Values] = [{name: p.grad for name, p in state.parameters.items()} for state in states]
    finally:
        running = [buffers.taken_back(item) for item in saved]
    if states[0].scaler.scales:  # the loss was multiplied by the first's scale
        factor = reciprocal(states[0].scale_state.scale)
        for bucket in bucketed(values):
            foreach_mul_(bucket, factor.to(bucket[0].device))
    grads = [Gradients(values, own) for values, own in zip(found, running, strict=True)]
    return (loss if aux is None else (loss, aux)), grads


def scaled_backward(
    loss_fn: LossFunction, states: Sequence[TorchState], batch: Any, others: Bystanders, quiet: Undisturbed
) -> tuple[torch.Tensor, Any]:
    """The float32 loss and aux; the gradients of the scaled loss are added to the parameters' `.grad` (S6).

    The casts stay installed during the backward pass, in which activation checkpointing runs the model again. An
    interrupt arrives while `loss_fn` or the backward pass runs.
    """
    policy, scaler = states[0].recipe.policy, states[0].scaler
    models = tuple(state.bound for state in states)
    for state in states:
        state.check_unchanged()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(matmul_precision(policy.float32_matmul))
        for model in models:
            stack.enter_context(model.installed())
        before = made()
        with autocast(policy, states[0].device.type), quiet.disturbed:
            result = loss_fn(models[0] if len(models) == 1 else models, batch)
        size = made() - before
        loss, aux = refusals.split_result(result)
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            raise LossError(
                "loss_fn must return a tensor that depends on the model's parameters. "
                f"Received: {type(loss).__name__} without a gradient. Is it detached, or under torch.no_grad()?"
            )
        refusals.check_loss(tuple(loss.shape), dtype_name(loss.dtype))
        for model in models:
            model.check_overrides_ran()
        wide = loss.float().reshape(())
        scaled = wide * states[0].scale_state.scale.to(wide.device) if scaler.scales else wide
        others.look(loss_fn, wide, size)
        with quiet.disturbed:
            torch.autograd.backward(scaled)
    return wide.detach(), map_tree(_detached, aux)


def _dense(parameters: Iterable[tuple[str, torch.Tensor]], *, needed: bool = True) -> list[torch.Tensor]:
    """The gradients that the backward pass left; a parameter that the loss does not depend on has none (S23).

    Raises:
        LossError: there is none at all, and one is needed.
        UnsupportedError: a sparse one, by name.
    """
    values = [grad for _, p in parameters if (grad := p.grad) is not None]
    if needed and not values:
        raise LossError("loss_fn depends on none of the model's trainable parameters, so there is nothing to update.")
    if not _STRIDED.issuperset(map(_LAYOUT, values)):
        name = next(name for name, p in parameters if p.grad is not None and p.grad.layout != torch.strided)
        raise UnsupportedError(
            f"the gradient of {name!r} is sparse. The step's kernels take whole tensors, and fused optimizers no "
            "sparse ones. Build the layer with sparse=False, or write the loop yourself with polyamp_torch.GradScaler."
        )
    return values


def apply_gradients(states: Sequence[TorchState], grads: Sequence[Gradients], skip: Skip) -> list[StepResult]:
    """Flag, clip, optimizer and one scale adjustment, in place (S9 to S15). A gradient of None leaves its parameter,
    and the optimizer's state for it, as they are. A parameter of several states is stepped by each one's optimizer, as
    torch's optimizers over one `.grad` do."""
    with Undisturbed(), together([state.turn for state in states]):
        return _applied_to(states, grads, skip)


def _applied_to(states: Sequence[TorchState], grads: Sequence[Gradients], skip: Skip) -> list[StepResult]:
    ready, commits = [], []
    for state, item in zip(states, grads, strict=True):
        state.check_unchanged()
        _require(state, item.values)
        fitted = _fitted(state, item.values)
        places: list[torch.Tensor] = [state.parameters[name] for name in fitted]
        ready.append(Scaled(list(fitted.values()), None, places))
        commits.append(functools.partial(buffers.commit, state.model, item.running))
    parameters = {id(p): p for state in states for p in state.parameters.values()}
    with set_aside(list(parameters.values()), used_up=True):
        return _applied(states, ready, skip, commits)


@torch.no_grad()
def _applied(
    states: Sequence[TorchState],
    grads: Sequence[Scaled],
    skip: Skip,
    commits: Sequence[Callable[[torch.Tensor | None], None]],
) -> list[StepResult]:
    """The update; `commits` give the buffers their values."""
    verdicts = [_judged(state, item) for state, item in zip(states, grads, strict=True)]
    flags = [verdict.finite for verdict, _ in verdicts]
    every = flags[0] if len(flags) == 1 else torch.stack([flag.to(flags[0].device) for flag in flags]).all()
    results = []
    for state, item, (verdict, by), commit in zip(states, grads, verdicts, commits, strict=True):
        checking = state.scaler.checks
        finite = (every if skip == "all" else verdict.finite).to(state.device) if checking else None
        _update(state, item, verdict.norm, by, finite)
        commit(finite)
        results.append(_concluded(state, verdict.norm, finite, every))
    torch.clear_autocast_cache()  # a caller's open region would serve the old weights to the next step
    return results


def _judged(state: TorchState, grads: Scaled) -> tuple[Measured, torch.Tensor | None]:
    """The norm and the flag, and the divisor that unscales and clips.

    Off the CPU, gradients that are so large that this divisor leaves float32 count as not finite: above
    3.4e38 * clip_norm before unscaling.
    """
    recipe = state.recipe
    norm, finite = measured(grads.values, grads.scale, least=state.scaler.min_scale, alike=state.one_device)
    by = divisor(norm, grads.scale, recipe.clip_norm)
    if by is not None and recipe.clip_norm is not None and not looks(norm.device):
        finite = finite & torch.isfinite(by.float())
    return Measured(norm, finite), by


def _update(
    state: TorchState, grads: Scaled, norm: torch.Tensor, by: torch.Tensor | None, finite: torch.Tensor | None
) -> None:
    """Unscale, clip and step; on the CPU not at all if the flag says so."""
    if looks(state.device):
        if finite is not None and not bool(finite):
            return
        if by is not None and by.item() == 1.0:
            by = None
    values = grads.values
    if grads.places is not None:
        if by is not None:
            values = [torch.empty_like(p).copy_(value) for p, value in zip(grads.places, values, strict=True)]
        for p, value in zip(grads.places, values, strict=True):
            p.grad = value
    if by is not None:
        by = _divided_before(state, values, grads.scale, norm, by)
    optimizers.apply(
        state.optimizer, state.recipe.optimizer, state.step, finite, by, values, state.kernels, state.rates
    )
    for p in grads.places or ():  # another state's optimizer may hold it too, with a gradient of its own clipping
        p.grad = None


def _divided_before(
    state: TorchState, values: list[torch.Tensor], scale: torch.Tensor | None, norm: torch.Tensor, by: torch.Tensor
) -> torch.Tensor | None:
    """Divide the gradients, unless the optimizer's kernels can: what is left to divide them by."""
    limit = state.recipe.clip_norm
    if looks(state.device) and not _ORDINARY[0] < by.item() < _ORDINARY[1] and limit is not None:
        divide_in_two_steps_(values, scale, clip.factor(norm, limit, XP))
        return None
    if optimizers.takes_divisor(state.optimizer):
        return by.float()
    divide_(values, by, alike=state.one_device)
    return None


def _concluded(state: TorchState, norm: torch.Tensor, finite: torch.Tensor | None, every: torch.Tensor) -> StepResult:
    """The counters and the scale after an update, and what to report."""
    scaler = state.scaler
    state.step = state.step + (1 if finite is None else finite.to(torch.int32))
    if scaler.checks:
        state.scale_state = _next_scale(state, every)
    skipped = torch.zeros((), dtype=torch.bool, device=state.device) if finite is None else ~finite
    return StepResult(None, None, norm.float(), state.scale_state.scale, skipped, state.step)


def _next_scale(state: TorchState, every: torch.Tensor) -> LossScaleState:
    """Rule S15 on the device; on the CPU over NumPy's float32 and int32 numbers, which is five times faster."""
    scaler, old = state.scaler, state.scale_state
    if not looks(state.device):
        return update(scaler, old, every.to(state.device), XP)
    new = update(scaler, LossScaleState(*(field.numpy()[()] for field in old)), bool(every), PYTHON)
    return LossScaleState(*(torch.scalar_tensor(v.item(), dtype=o.dtype) for v, o in zip(new, old, strict=True)))


def _fitted(state: TorchState, values: Values) -> dict[str, torch.Tensor]:
    """Gradients that a user may have replaced: in the parameters' order, dtype and memory layout, without the None."""
    fitted = {}
    for name, parameter in state.parameters.items():
        value = values[name]
        if value is None:
            continue
        if value.dtype != parameter.dtype or value.stride() != parameter.stride():
            value = torch.empty_like(parameter).copy_(value)
        fitted[name] = value.detach()
    return fitted


def _require(state: TorchState, values: Values) -> None:
    """Refuse gradients that do not fit the parameters."""
    refusals.check_gradients(
        [(name, tuple(p.shape)) for name, p in state.parameters.items()],
        [(name, None if value is None else tuple(value.shape)) for name, value in values.items()],
    )


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf

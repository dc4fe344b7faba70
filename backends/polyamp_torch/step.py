"""The torch step: scaled gradients, unscale, norm and flag, clip, optimizer, scale adjustment (S6 to S15).

`value_and_grad` is the first half, `apply_gradients` the second, and `train_step` is both on one state. Nothing here
reads a value on the host of an accelerator; see `optimizers.apply` for the optimizers that must.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from polyamp import checks
from polyamp.backend import Gradients, LossFunction, Skip, StepResult
from polyamp.errors import BatchError, LossError, ModelError, UnsupportedError
from polyamp.loss_scale import update
from polyamp.recipe import Recipe
from polyamp.trees import map_tree, map_trees, micro_batches
from polyamp_torch import buffers, optimizers
from polyamp_torch.arrays import XP, dtype_name, to_device
from polyamp_torch.autocast import autocast, matmul_precision
from polyamp_torch.gradients import global_norm, reciprocal
from polyamp_torch.state import TorchState

Values = dict[str, torch.Tensor | None]


def train_step(loss_fn: LossFunction, recipe: Recipe, state: TorchState, batch: Any) -> StepResult:
    """One step on one state, over `accumulate_steps` micro-batches (S8)."""
    batches = micro_batches(to_device(batch, state.device), recipe.accumulate_steps)
    saved = buffers.snapshot(state.model)
    losses, auxes, total = [], [], None
    try:
        for part in batches:
            loss, aux, (values,) = scaled_gradients(loss_fn, [state], part)
            if any(value is None for value in values.values()):
                _require(state, values)
            losses.append(loss)
            auxes.append(aux)
            total = values if total is None else _added(total, values)
    finally:
        running = buffers.taken_back(saved)
    assert total is not None
    loss, aux = losses[0], auxes[0]
    if len(batches) > 1:
        loss, aux = torch.stack(losses).mean(), None if aux is None else map_trees(_stack, auxes)
    unscale_(total, state, count=len(batches))
    (result,) = _applied([state], [Gradients(total, running)], "all")
    return result._replace(loss=loss, aux=aux)


def value_and_grad(loss_fn: LossFunction, states: Sequence[TorchState], batch: Any) -> tuple[Any, list[Gradients]]:
    """The value of `loss_fn` and the unscaled gradients of each state; the states stay as they are."""
    saved = [buffers.snapshot(state.model) for state in states]
    try:
        loss, aux, scaled = scaled_gradients(loss_fn, states, to_device(batch, states[0].device))
    finally:
        running = [buffers.taken_back(item) for item in saved]
    for values in scaled:
        unscale_(values, states[0], count=1)  # the loss was multiplied by the first's scale
    grads = [Gradients(values, own) for values, own in zip(scaled, running, strict=True)]
    return (loss if aux is None else (loss, aux)), grads


def scaled_gradients(
    loss_fn: LossFunction, states: Sequence[TorchState], batch: Any
) -> tuple[torch.Tensor, Any, list[Values]]:
    """The float32 loss, aux, and the gradients of the scaled loss per state (S6).

    The casts stay installed during the backward pass, in which activation checkpointing runs the model again.
    """
    policy, scaler = states[0].recipe.policy, states[0].recipe.loss_scaler
    models = tuple(state.bound for state in states)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(matmul_precision(policy.float32_matmul))
        for model in models:
            stack.enter_context(model.installed())
        with autocast(policy, states[0].device.type):
            loss, aux = checks.split_result(loss_fn(models[0] if len(models) == 1 else models, batch))
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            raise LossError(
                "loss_fn must return a tensor that depends on the model's parameters. "
                f"Received: {type(loss).__name__} without a gradient. Is it detached, or under torch.no_grad()?"
            )
        checks.check_loss(tuple(loss.shape), dtype_name(loss.dtype))
        for model in models:
            model.check_overrides_ran()
        wide = loss.float().reshape(())
        grads = _backward(wide * states[0].scale_state.scale if scaler.scales else wide, states)
    return wide.detach(), map_tree(_detached, aux), grads


def _backward(scaled: torch.Tensor, states: Sequence[TorchState]) -> list[Values]:
    """`scaled.backward()` with the parameters' own `.grad` set aside meanwhile.

    `torch.autograd.grad` would be shorter, but its gradients may share memory with each other and be laid out unlike
    their parameters, which in-place unscaling and the fused kernels cannot take; `.grad` keeps torch's layout contract.
    """
    parameters = [p for state in states for p in state.parameters.values()]
    if not all(p.requires_grad for p in parameters):
        frozen = next(n for state in states for n, p in state.parameters.items() if not p.requires_grad)
        raise ModelError(f"parameter {frozen!r} was frozen after init. Call polyamp.init again to train the others.")
    held = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        scaled.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        grads: list[Values] = [{name: p.grad for name, p in state.parameters.items()} for state in states]
    finally:
        for p, old in zip(parameters, held, strict=True):
            p.grad = old
    for values in grads:
        _require_dense(values)
    return grads


def unscale_(values: Values, state: TorchState, *, count: int) -> None:
    """Divide gradients in place by the scale that produced them and by the number of micro-batches (S7, S8)."""
    grads = [value for value in values.values() if value is not None]
    if count > 1:
        torch._foreach_div_(grads, float(count))
    if state.recipe.loss_scaler.scales and grads:
        torch._foreach_mul_(grads, reciprocal(state.scale_state.scale))


def apply_gradients(states: Sequence[TorchState], grads: Sequence[Gradients], skip: Skip) -> list[StepResult]:
    """Flag, clip, optimizer and one scale adjustment, in place (S9 to S15)."""
    fitted = []
    for state, item in zip(states, grads, strict=True):
        _require(state, item.values)
        fitted.append(item._replace(values=_fitted(state, item.values)))
    return _applied(states, fitted, skip)


def _applied(states: Sequence[TorchState], grads: Sequence[Gradients], skip: Skip) -> list[StepResult]:
    norms = [global_norm(list(item.values.values())) for item in grads]
    flags = [torch.isfinite(norm) for norm in norms]
    every = flags[0] if len(flags) == 1 else torch.stack([flag.to(flags[0].device) for flag in flags]).all()
    return [
        _apply(state, item, norm, every if skip == "all" else own, every)
        for state, item, norm, own in zip(states, grads, norms, flags, strict=True)
    ]


@torch.no_grad()
def _apply(
    state: TorchState, grads: Gradients, norm: torch.Tensor, own: torch.Tensor, every: torch.Tensor
) -> StepResult:
    """One state's part: `own` decides about this state, `every` about the scale (S14)."""
    recipe, scaler = state.recipe, state.recipe.loss_scaler
    finite = own.to(state.device) if scaler.checks else None
    values = list(grads.values.values())
    if recipe.clip_norm is not None:
        factor = checks.clip_factor(norm, recipe.clip_norm, XP).float()
        values = list(torch._foreach_mul(values, factor))
    for parameter, value in zip(state.parameters.values(), values, strict=True):
        parameter.grad = value
    try:
        optimizers.apply(state.optimizer, recipe.optimizer, state.step, finite)
    finally:
        for parameter in state.parameters.values():
            parameter.grad = None
    torch.clear_autocast_cache()  # a caller's open region would serve the old weights to the next step
    buffers.commit(state.model, grads.running, finite)
    state.step = state.step + (1 if finite is None else finite.to(torch.int32))
    if scaler.checks:
        state.scale_state = update(scaler, state.scale_state, every.to(state.device), XP)
    skipped = torch.zeros((), dtype=torch.bool, device=state.device) if finite is None else ~finite
    return StepResult(None, None, norm.float(), state.scale_state.scale, skipped, state.step)


def _fitted(state: TorchState, values: Values) -> dict[str, torch.Tensor]:
    """Gradients that a user may have replaced: in the parameters' order, dtype and memory layout."""
    fitted = {}
    for name, parameter in state.parameters.items():
        value = values[name]
        assert value is not None
        if value.dtype != parameter.dtype or value.stride() != parameter.stride():
            value = torch.empty_like(parameter).copy_(value)
        fitted[name] = value.detach()
    return fitted


def _require(state: TorchState, values: Values) -> None:
    """Refuse gradients that do not fit the parameters, `None` included."""
    checks.check_gradients(
        [(name, tuple(p.shape)) for name, p in state.parameters.items()],
        [(name, None if value is None else tuple(value.shape)) for name, value in values.items()],
    )


def _require_dense(values: Values) -> None:
    for name, value in values.items():
        if value is not None and value.layout != torch.strided:
            raise UnsupportedError(
                f"the gradient of {name!r} is sparse, which the torch backend cannot clip and check yet. Build the "
                "layer with sparse=False."
            )


def _added(total: Values, values: Values) -> Values:
    parts = [[value for value in item.values() if value is not None] for item in (total, values)]
    return dict(zip(total, torch._foreach_add(*parts), strict=True))


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _stack(leaves: list[Any]) -> Any:
    if leaves[0] is None:
        return None
    try:
        return torch.stack([torch.as_tensor(leaf) for leaf in leaves])
    except (RuntimeError, TypeError) as error:
        raise BatchError("aux must be tensors or numbers of one shape in every micro-batch, to be stacked.") from error

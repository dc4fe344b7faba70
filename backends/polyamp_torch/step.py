"""The torch step: scaled gradients, unscale, norm and flag, clip, optimizer, scale adjustment (S6 to S15).

`value_and_grad` is the first half, `apply_gradients` the second, and `train_step` is both on one state. Nothing here
reads a value on the host; see `optimizers.apply` for the optimizers that must.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from polyamp import checks
from polyamp.backend import Gradients, LossFunction, Skip, StepResult
from polyamp.errors import BatchError, LossError, UnsupportedError
from polyamp.loss_scale import update
from polyamp.recipe import Recipe
from polyamp.trees import map_tree, map_trees, micro_batches
from polyamp_torch import optimizers
from polyamp_torch.arrays import XP, dtype_name, to_device
from polyamp_torch.autocast import autocast
from polyamp_torch.state import TorchState

Values = dict[str, torch.Tensor | None]


def train_step(loss_fn: LossFunction, recipe: Recipe, state: TorchState, batch: Any) -> StepResult:
    """One step on one state, over `accumulate_steps` micro-batches (S8)."""
    batches = micro_batches(to_device(batch, state.device), recipe.accumulate_steps)
    before = _snapshot(state)
    losses, auxes, total = [], [], None
    try:
        for part in batches:
            loss, aux, (values,) = scaled_gradients(loss_fn, [state], part)
            if any(value is None for value in values.values()):
                _require(state, values)
            losses.append(loss)
            auxes.append(aux)
            total = values if total is None else _added(total, values)
        assert total is not None
        after = _snapshot(state)
    finally:
        _restore(state, before)
    unscale_(total, state, count=len(batches))
    (result,) = _applied([state], [Gradients(total, after)], "all")
    if len(batches) == 1:
        return result._replace(loss=losses[0], aux=auxes[0])
    return result._replace(loss=torch.stack(losses).mean(), aux=None if auxes[0] is None else map_trees(_stack, auxes))


def value_and_grad(loss_fn: LossFunction, states: Sequence[TorchState], batch: Any) -> tuple[Any, list[Gradients]]:
    """The value of `loss_fn` and the unscaled gradients of each state; the states stay as they are."""
    before = [_snapshot(state) for state in states]
    try:
        loss, aux, scaled = scaled_gradients(loss_fn, states, to_device(batch, states[0].device))
        after = [_snapshot(state) for state in states]
    finally:
        for state, saved in zip(states, before, strict=True):
            _restore(state, saved)
    for values in scaled:
        unscale_(values, states[0], count=1)  # the loss was multiplied by the first's scale
    grads = [Gradients(values, running) for values, running in zip(scaled, after, strict=True)]
    return (loss if aux is None else (loss, aux)), grads


def scaled_gradients(
    loss_fn: LossFunction, states: Sequence[TorchState], batch: Any
) -> tuple[torch.Tensor, Any, list[Values]]:
    """The float32 loss, aux, and the gradients of the scaled loss per state (S6)."""
    state, scaler = states[0], states[0].recipe.loss_scaler
    models = tuple(item.bound for item in states)
    with torch.enable_grad(), autocast(state.recipe.policy, state.device.type):
        loss, aux = checks.split_result(loss_fn(models[0] if len(models) == 1 else models, batch))
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        raise LossError(
            "loss_fn must return a tensor that depends on the model's parameters. "
            f"Received: {type(loss).__name__} without a gradient. Is it detached, or under torch.no_grad()?"
        )
    checks.check_loss(tuple(loss.shape), dtype_name(loss.dtype))
    wide = loss.float().reshape(())
    scaled = wide * state.scale_state.scale if scaler.scales else wide
    parameters = [p for item in states for p in item.parameters.values()]
    rest = iter(torch.autograd.grad(scaled, parameters, allow_unused=True))
    grads: list[Values] = [{name: next(rest) for name in item.parameters} for item in states]
    for values in grads:
        _require_dense(values)
    return wide.detach(), _detached(aux), grads


def unscale_(values: Values, state: TorchState, *, count: int) -> None:
    """Divide gradients in place by the scale that produced them and by the number of micro-batches (S7, S8)."""
    grads = [value for value in values.values() if value is not None]
    if count > 1:
        torch._foreach_div_(grads, float(count))
    if state.recipe.loss_scaler.scales and grads:
        torch._foreach_mul_(grads, reciprocal(state.scale_state.scale))


def reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale, rounded once: exact for powers of two."""
    return scale.double().reciprocal().float()


def global_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """The L2 norm of all gradients as a float64 scalar, finite exactly when every float32 gradient is.

    The fast pass accumulates in float32. Where its squares leave float32's range it is taken again in float64; on the
    CPU that is decided by looking, elsewhere the float64 pass is the only one, so that nothing waits for the device.
    """
    if grads[0].device.type == "cpu":
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        if 1e-15 < norm.item() < 1e15:
            return norm.double()
    wide: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float64)))
    return wide


def apply_gradients(states: Sequence[TorchState], grads: Sequence[Gradients], skip: Skip) -> list[StepResult]:
    """Flag, clip, optimizer and one scale adjustment, in place (S9 to S15)."""
    for state, item in zip(states, grads, strict=True):
        _require(state, item.values)
    return _applied(states, grads, skip)


def _applied(states: Sequence[TorchState], grads: Sequence[Gradients], skip: Skip) -> list[StepResult]:
    norms = [global_norm(list(item.values.values())) for item in grads]
    flags = [torch.isfinite(norm) for norm in norms]
    every = flags[0] if len(flags) == 1 else torch.stack([flag.to(flags[0].device) for flag in flags]).all()
    return [
        _apply(state, item, norm, every if skip == "all" else own, every)
        for state, item, norm, own in zip(states, grads, norms, flags, strict=True)
    ]


def _apply(
    state: TorchState, grads: Gradients, norm: torch.Tensor, own: torch.Tensor, every: torch.Tensor
) -> StepResult:
    """One state's part: `own` decides about this state, `every` about the scale (S14)."""
    recipe, scaler = state.recipe, state.recipe.loss_scaler
    finite = own if scaler.checks else None
    narrow = norm.float()
    with torch.no_grad():
        values = list(grads.values.values())
        if recipe.clip_norm is not None:
            factor = checks.clip_factor(norm, recipe.clip_norm, XP).float()
            values = list(torch._foreach_mul(values, factor))
        for parameter, value in zip(state.parameters.values(), values, strict=True):
            parameter.grad = value
        optimizers.apply(state.optimizer, recipe.optimizer, state.step, finite)
        for parameter in state.parameters.values():
            parameter.grad = None
        torch.clear_autocast_cache()  # a caller's open region would serve the old weights to the next step
        for buffer, new in zip(state.running(), grads.running, strict=True):
            buffer.copy_(new if finite is None else torch.where(finite, new, buffer))
        state.step = state.step + (1 if finite is None else finite.to(torch.int32))
        if scaler.checks:
            state.scale_state = update(scaler, state.scale_state, every.to(state.device), XP)
    skipped = torch.zeros((), dtype=torch.bool, device=state.device) if finite is None else ~finite
    return StepResult(None, None, narrow, state.scale_state.scale, skipped, state.step)


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


def _snapshot(state: TorchState) -> list[torch.Tensor]:
    return [buffer.clone() for buffer in state.running()]


def _restore(state: TorchState, saved: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for buffer, old in zip(state.running(), saved, strict=True):
            buffer.copy_(old)


def _detached(aux: Any) -> Any:
    return map_tree(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, aux)


def _stack(leaves: list[Any]) -> torch.Tensor:
    try:
        return torch.stack([torch.as_tensor(leaf) for leaf in leaves])
    except (RuntimeError, TypeError) as error:
        raise BatchError("aux must be tensors or numbers of one shape in every micro-batch, to be stacked.") from error

"""Refresh of a training state after its model was changed in place, or wrapped (S28).

A parameter survives if it is the same object. polyamp's own optimizers are rebuilt with the state arrays of the
surviving parameters. The old optimizer object takes over the result, because torch's schedulers may refer to it. A
native optimizer belongs to the user, so its parameter groups are edited in place.
"""

from __future__ import annotations

from typing import Any

import torch

from polyamp.errors import ModelError
from polyamp.recipe.optimizers import is_spec
from polyamp.recipe.scaler import LossScaleState
from polyamp.rules.refresh import KnownParameter, RefreshPlan
from polyamp_torch.distributed.replicas import check_replicas
from polyamp_torch.step.state import TorchState
from polyamp_torch.step.torch_only.critical_section import DeferInterrupts
from polyamp_torch.step.torch_only.model_readers import model_reader


def refresh_state(state: TorchState, model: Any, plan: RefreshPlan) -> TorchState:
    """Return a new state; the old one then refuses to step. If this fails, nothing changes.

    Raises:
        ModelError: for the same reasons as `init`; or a native optimizer has several groups for a new parameter.
    """
    with DeferInterrupts(), state.lock:
        state.check_alive()
        if state.rates is not None:
            state.rates.multiples()  # convert, or refuse, rates set by the user before anything changes
        model = state.model if model is None else model
        survivors = plan.surviving_parameters(
            _known_parameters(state.shapes()), _known_parameters(_trained_parameters(model))
        )
        native = not is_spec(state.recipe.optimizer)
        new = (
            _carry_native_optimizer(state, model, survivors)
            if native
            else TorchState(model, state.recipe, state.backend)
        )
        check_replicas(new)
        if not native:
            _carry_spec_optimizer(state, new, survivors)
        new.scale_state = LossScaleState(*(field.to(new.device) for field in state.scale_state))
        new.step = state.step.to(new.device)
        new.watch = state.watch
        if new.averages is not None and state.averages is not None:
            new.averages.carry(state.averages, survivors)
        old = state.optimizer_settings.get("groups", {})  # the values of init, for checkpoints
        made = new.optimizer_settings["groups"]
        new.optimizer_settings = {"groups": {index: old.get(index, options) for index, options in made.items()}}
        state.retire()
        if not native:
            new.adopt_optimizer(state.optimizer)
        return new


def _trained_parameters(model: Any) -> dict[str, tuple[int, tuple[int, ...]]]:
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"refresh: model must be an nn.Module. Received: {type(model).__name__}.")
    return {name: (id(p), tuple(p.shape)) for name, p in model_reader(model).trained().items()}


def _known_parameters(found: dict[str, tuple[int, tuple[int, ...]]]) -> dict[str, KnownParameter]:
    return {name: KnownParameter(*entry) for name, entry in found.items()}


# An optimizer of a spec.


@torch.no_grad()
def _carry_spec_optimizer(state: TorchState, new: TorchState, survivors: dict[str, str]) -> None:
    """Copy the arrays of surviving parameters, and options that the user wrote into groups, to the new optimizer."""
    old, made = state.optimizer, new.optimizer
    if len(old.param_groups) > len(state.groups.distinct) and not new.groups.is_uniform:
        raise ModelError(
            "the optimizer's parameter groups were divided by hand, and the recipe's groups now divide the parameters "
            "of the changed model too. Say the division in the recipe's groups, and call polyamp.init."
        )
    for now, before in survivors.items():
        slots = made.state[new.parameters[now]]
        for slot, value in old.state[state.parameters[before]].items():
            if slot in slots:
                slots[slot].copy_(value)
    members = list(state.groups.distinct)
    for member, group in zip(new.groups.distinct, made.param_groups, strict=True):
        if member in members:
            group.update(_merge_group_options(old.param_groups[members.index(member)], group))
    moved = {id(new.parameters[now]): id(state.parameters[before]) for now, before in survivors.items()}
    for divided in old.param_groups[len(members) :]:  # the user's groups, after those of the recipe
        own = {id(p) for p in divided["params"]}
        taken = []
        for group in made.param_groups:
            taken += [p for p in group["params"] if moved.get(id(p)) in own]
            group["params"] = [p for p in group["params"] if moved.get(id(p)) not in own]
        made.param_groups.append({"params": taken, **_merge_group_options(divided, made.param_groups[0])})
    if len(old.param_groups) > len(members):
        new.accept_moved_groups()
    if new.rates is not None and state.rates is not None:
        new.rates.carry_rates(state.rates)


def _merge_group_options(group: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    """Return a group's options for a rebuilt group, whose new parameters may not support fused kernels."""
    options = {name: value for name, value in group.items() if name != "params"}
    return options if made.get("fused") or "fused" not in made else {**options, "fused": made["fused"]}


# An optimizer of torch's own.


def _carry_native_optimizer(state: TorchState, model: torch.nn.Module, survivors: dict[str, str]) -> TorchState:
    """Return the state over the edited groups; restore the groups if it cannot be created."""
    optimizer = state.optimizer
    groups = [list(group["params"]) for group in optimizer.param_groups]
    slots = dict(optimizer.state)
    try:
        _edit_native_groups(state, model, survivors)
        new = TorchState(model, state.recipe, state.backend)
        check_replicas(new)
        return new
    except BaseException:
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = params
        optimizer.state.clear()
        optimizer.state.update(slots)
        raise


def _edit_native_groups(state: TorchState, model: torch.nn.Module, survivors: dict[str, str]) -> None:
    """Remove departed parameters and their slots from the groups; add new parameters to the only group."""
    optimizer = state.optimizer
    now = model_reader(model).trained()
    kept = {id(state.parameters[before]): now[name] for name, before in survivors.items()}
    trained = {id(p) for p in now.values()}
    for group in optimizer.param_groups:  # the replacement of a surviving parameter takes its place
        group["params"] = [kept.get(id(p), p) for p in group["params"] if id(p) in kept or id(p) in trained]
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [(name, p) for name, p in now.items() if id(p) not in held]
    if missing and len(optimizer.param_groups) > 1:
        raise ModelError(
            f"parameter {missing[0][0]!r} is new, and the optimizer has {len(optimizer.param_groups)} parameter "
            "groups. Say which options it has before polyamp.refresh(state): "
            "state.optimizer.add_param_group({'params': [...]}), or put it into state.optimizer.param_groups[n]."
        )
    optimizer.param_groups[0]["params"] += [p for _, p in missing]
    slots = {p: values for p, values in optimizer.state.items() if id(p) in kept}
    optimizer.state.clear()
    for p, values in slots.items():
        own = kept[id(p)]
        optimizer.state[own] = {slot: _slot_like_parameter(value, p, own) for slot, value in values.items()}


@torch.no_grad()
def _slot_like_parameter(value: Any, before: torch.Tensor, p: torch.Tensor) -> Any:
    """Return a slot's value on the device and with the strides of its parameter, which may have changed."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == p.shape and p.dim():
        same = value.device == p.device and value.stride() == p.stride()
        return value if same else torch.empty_like(p, dtype=value.dtype).copy_(value)
    return value.to(p.device) if value.device == before.device != p.device else value

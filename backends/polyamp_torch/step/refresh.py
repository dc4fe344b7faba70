"""The state that goes on after a model was changed in place, or wrapped (S28). Called by the backend.

A parameter stayed if it is the same object. polyamp's own optimizers are made anew, given the state arrays of what
stayed, and put into the old object, which schedulers of torch's may hold; a native optimizer is the user's, so its
parameter groups are edited in place.
"""

from __future__ import annotations

from typing import Any

import torch

from polyamp.errors import ModelError
from polyamp.recipe.optimizers import is_spec
from polyamp.rules.growing import Growth, Known
from polyamp.rules.scale import LossScaleState
from polyamp_torch.precision.parameter_listing import tree_parameters
from polyamp_torch.precision.paths import path_of
from polyamp_torch.step.interrupts import Undisturbed
from polyamp_torch.step.replicas import check
from polyamp_torch.step.state import TorchState


def refreshed(state: TorchState, model: Any, growth: Growth) -> TorchState:
    """A new state; the old one refuses to step from then on. Where this fails, all is as it was.

    Raises:
        ModelError: what `init` refuses; a new parameter that belongs into one of several groups of a native optimizer.
    """
    with Undisturbed(), state.turn:
        state.check_alive()
        if state.rates is not None:
            state.rates.multiples()  # rates written by hand are taken for multiples, or refused, before anything moves
        model = state.model if model is None else model
        stayed = growth.stayed(_known(state.shapes()), _known(_trained(model)))
        native = not is_spec(state.recipe.optimizer)
        new = _with_native(state, model, stayed) if native else TorchState(model, state.recipe, state.backend)
        check(new)
        if not native:
            _carry(state, new, stayed)
        new.scale_state = LossScaleState(*(field.to(new.device) for field in state.scale_state))
        new.step = state.step.to(new.device)
        new.watch = state.watch
        old = state.optimizer_settings.get("groups", {})  # as they were at init, for checkpoints
        made = new.optimizer_settings["groups"]
        new.optimizer_settings = {"groups": {index: old.get(index, options) for index, options in made.items()}}
        state.retire()
        if not native:
            new.hold(state.optimizer)
        return new


def _trained(model: Any) -> dict[str, tuple[int, tuple[int, ...]]]:
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"refresh: model must be an nn.Module. Received: {type(model).__name__}.")
    named, path = tree_parameters(model), path_of(model)
    return {path(name): (id(p), tuple(p.shape)) for name, p in named if p.requires_grad}


def _known(found: dict[str, tuple[int, tuple[int, ...]]]) -> dict[str, Known]:
    return {name: Known(*entry) for name, entry in found.items()}


# An optimizer of a spec.


@torch.no_grad()
def _carry(state: TorchState, new: TorchState, stayed: dict[str, str]) -> None:
    """Give the new optimizer the arrays of what stayed, and the options that were written into the groups by hand."""
    old, made = state.optimizer, new.optimizer
    if len(old.param_groups) > len(state.groups.distinct) and not new.groups.alike:
        raise ModelError(
            "the optimizer's parameter groups were divided by hand, and the recipe's groups now divide the parameters "
            "of the changed model too. Say the division in the recipe's groups, and call polyamp.init."
        )
    for now, before in stayed.items():
        slots = made.state[new.parameters[now]]
        for slot, value in old.state[state.parameters[before]].items():
            if slot in slots:
                slots[slot].copy_(value)
    members = list(state.groups.distinct)
    for member, group in zip(new.groups.distinct, made.param_groups, strict=True):
        if member in members:
            group.update(_options(old.param_groups[members.index(member)], group))
    moved = {id(new.parameters[now]): id(state.parameters[before]) for now, before in stayed.items()}
    for divided in old.param_groups[len(members) :]:  # by hand, behind those of the recipe
        own = {id(p) for p in divided["params"]}
        taken = []
        for group in made.param_groups:
            taken += [p for p in group["params"] if moved.get(id(p)) in own]
            group["params"] = [p for p in group["params"] if moved.get(id(p)) not in own]
        made.param_groups.append({"params": taken, **_options(divided, made.param_groups[0])})
    if len(old.param_groups) > len(members):
        new.groups_moved()
    if new.rates is not None and state.rates is not None:
        new.rates.go_on(state.rates)


def _options(group: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    """What stands in a group, for one that was made anew: a new parameter may be none for the fused kernels."""
    options = {name: value for name, value in group.items() if name != "params"}
    return options if made.get("fused") or "fused" not in made else {**options, "fused": made["fused"]}


# An optimizer of torch's own.


def _with_native(state: TorchState, model: torch.nn.Module, stayed: dict[str, str]) -> TorchState:
    """The state over the edited groups; they are put back where it cannot be made."""
    optimizer = state.optimizer
    groups = [list(group["params"]) for group in optimizer.param_groups]
    slots = dict(optimizer.state)
    try:
        _edit(state, model, stayed)
        new = TorchState(model, state.recipe, state.backend)
        check(new)
        return new
    except BaseException:
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = params
        optimizer.state.clear()
        optimizer.state.update(slots)
        raise


def _edit(state: TorchState, model: torch.nn.Module, stayed: dict[str, str]) -> None:
    """Take what went out of the groups, with its slots, and put what is new into the only one."""
    optimizer = state.optimizer
    path = path_of(model)
    now = {path(name): p for name, p in tree_parameters(model) if p.requires_grad}
    kept = {id(state.parameters[before]): now[name] for name, before in stayed.items()}
    trained = {id(p) for p in now.values()}
    for group in optimizer.param_groups:  # a parameter that was replaced, and is to be kept, takes its place
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
        optimizer.state[own] = {slot: _beside(value, p, own) for slot, value in values.items()}


@torch.no_grad()
def _beside(value: Any, before: torch.Tensor, p: torch.Tensor) -> Any:
    """A slot's value laid out like its parameter, which may have been moved or laid out anew since."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == p.shape and p.dim():
        same = value.device == p.device and value.stride() == p.stride()
        return value if same else torch.empty_like(p, dtype=value.dtype).copy_(value)
    return value.to(p.device) if value.device == before.device != p.device else value

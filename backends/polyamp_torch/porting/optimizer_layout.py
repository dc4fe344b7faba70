"""Mapping of `torch.optim` state arrays and options to the names of polyamp's optimizer specs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from polyamp.porting.states.optimizer_layout import OptimizerLayout, UpdateCount
from polyamp.recipe.optimizer_spec import NativeOptimizer, Spec
from polyamp.recipe.optimizers import SPECS
from polyamp_torch.step.torch_only.spec_formulas import native_class, slot_name, torch_native

_FORMULA_DEFAULTS: Final = {"amsgrad": False, "dampening": 0.0, "maximize": False}
"""Options that change the formula, and the value at which they have no effect."""


def checkpoint_slots(
    paths: Iterable[str], slots: Iterable[str], *, counts: bool
) -> tuple[dict[str, dict[str, str]], dict[str, UpdateCount]]:
    """Return the names of an optimizer's arrays in a checkpoint, slot -> path -> array, and the update counts.

    >>> checkpoint_slots(["head/bias"], ["momentum"], counts=False)[0]
    {'momentum': {'head/bias': 'optimizer/state/head/bias/momentum_buffer'}}
    """
    paths = list(paths)
    named = {slot: {path: f"optimizer/state/{path}/{slot_name(slot)}" for path in paths} for slot in slots}
    return named, {path: UpdateCount(f"optimizer/state/{path}/step") for path in paths} if counts else {}


def read_optimizer_layout(optimizer: torch.optim.Optimizer, paths: Mapping[int, str]) -> OptimizerLayout:
    """Return the layout of a torch optimizer's arrays.

    Args:
        optimizer: the optimizer; changes of its learning rates by schedulers are state of the schedulers.
        paths: id of a parameter -> path, for the trained parameters.
    """
    kind, native = _spec_of(optimizer)
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if kind is None or native is None:
        refused = [f"it is trained by {name}, of which polyamp knows no formula"]
        return OptimizerLayout({}, {}, [{"type": name}], dict.fromkeys(paths.values(), 0), refused=refused)
    distinct, refused = [], []
    numbers: dict[str, int] = {}
    slots: dict[str, None] = {}
    for index, group in enumerate(optimizer.param_groups):
        settings = _hyperparameters(kind, native, group)
        distinct.append(settings)
        numbers |= {paths[id(p)]: index for p in group["params"] if id(p) in paths}
        slots |= dict.fromkeys(kind.unchecked(group).slots)
        refused += [
            f"{option}={group[option]!r} in parameter group {index} of {name}"
            for option, plain in _FORMULA_DEFAULTS.items()
            if group.get(option, plain) != plain
        ]
    named, counts = checkpoint_slots(paths.values(), slots, counts=native.counts)
    return OptimizerLayout(named, counts, distinct, numbers, refused=refused)


def _spec_of(optimizer: torch.optim.Optimizer) -> tuple[type[Spec] | None, NativeOptimizer | None]:
    """Return the spec with the formula of a torch optimizer, and its description; AdamW is a subclass of Adam."""
    for spec in reversed(SPECS):
        native = torch_native(spec)
        if native is not None and isinstance(optimizer, native_class(native)):
            return spec, native
    return None, None


def _hyperparameters(spec: type[Spec], native: NativeOptimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    decoupled = group.get("decoupled_weight_decay")
    kind = "adamw" if spec.tag == "adam" and decoupled else spec.tag
    found = {"type": kind, "learning_rate": float(group["lr"])}
    for word in native.options or spec.field_names[1:-1]:
        if word in group:
            value = group[word]
            found[word] = [float(item) for item in value] if isinstance(value, tuple | list) else value
    return found

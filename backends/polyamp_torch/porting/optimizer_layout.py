"""Mapping of `torch.optim` state arrays and options to the names of polyamp's optimizer specs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch

from polyamp.porting.states.optimizer_layout import OptimizerLayout, UpdateCount
from polyamp_torch.step.optimizers import LionOptimizer, slot_name


class _OptimizerClass(NamedTuple):
    """One class of `torch.optim`.

    Attributes:
        type: polyamp's name of the optimizer.
        slots: polyamp's names of its slots. `sometimes` adds slots that exist only if an option is set.
        counts: whether it counts the updates of each parameter.
    """

    type: str
    slots: tuple[str, ...]
    sometimes: Mapping[str, str]
    counts: bool = True


_OPTIMIZER_CLASSES: Final[Mapping[type, _OptimizerClass]] = {
    torch.optim.SGD: _OptimizerClass("sgd", (), {"momentum": "momentum"}, counts=False),
    torch.optim.AdamW: _OptimizerClass("adamw", ("exp_avg", "exp_avg_sq"), {}),
    torch.optim.Adam: _OptimizerClass("adam", ("exp_avg", "exp_avg_sq"), {}),
    torch.optim.RMSprop: _OptimizerClass("rmsprop", ("square_avg",), {"momentum": "momentum", "centered": "grad_avg"}),
    torch.optim.Adagrad: _OptimizerClass("adagrad", ("sum",), {}),
    LionOptimizer: _OptimizerClass("lion", ("exp_avg",), {}, counts=False),
}
_HYPERPARAMETERS: Final = ("betas", "eps", "weight_decay", "momentum", "nesterov", "alpha", "centered", "lr_decay")
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
    kind = next((found for known, found in _OPTIMIZER_CLASSES.items() if isinstance(optimizer, known)), None)
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if kind is None:
        refused = [f"it is trained by {name}, of which polyamp knows no formula"]
        return OptimizerLayout({}, {}, [{"type": name}], dict.fromkeys(paths.values(), 0), refused=refused)
    distinct, refused = [], []
    numbers: dict[str, int] = {}
    slots = dict.fromkeys(kind.slots)
    for index, group in enumerate(optimizer.param_groups):
        settings = _hyperparameters(kind.type, group)
        distinct.append(settings)
        numbers |= {paths[id(p)]: index for p in group["params"] if id(p) in paths}
        slots |= {slot: None for option, slot in kind.sometimes.items() if group.get(option)}
        refused += [
            f"{option}={group[option]!r} in parameter group {index} of {name}"
            for option, plain in _FORMULA_DEFAULTS.items()
            if group.get(option, plain) != plain
        ]
    named, counts = checkpoint_slots(paths.values(), slots, counts=kind.counts)
    return OptimizerLayout(named, counts, distinct, numbers, refused=refused)


def _hyperparameters(kind: str, group: Mapping[str, Any]) -> dict[str, Any]:
    decoupled = group.get("decoupled_weight_decay")
    if kind == "adam" and decoupled:
        kind = "adamw"
    found = {"type": kind, "learning_rate": float(group["lr"])}
    for word in _HYPERPARAMETERS:
        if word in group:
            value = group[word]
            found[word] = [float(item) for item in value] if isinstance(value, tuple | list) else value
    return found

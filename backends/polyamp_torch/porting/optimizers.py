"""What `torch.optim` calls what polyamp's specs keep, and its options in their words. Called by `states` and
`training`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch

from polyamp.porting.states.layout import Count, OptimizerLayout
from polyamp_torch.step.optimizers import LionOptimizer, slot_name


class _Kind(NamedTuple):
    """One class of `torch.optim`.

    Attributes:
        type: what polyamp calls it.
        slots: as polyamp calls them; those in `sometimes` where that option is set.
        counts: whether it counts each parameter's updates.
    """

    type: str
    slots: tuple[str, ...]
    sometimes: Mapping[str, str]
    counts: bool = True


_KINDS: Final[Mapping[type, _Kind]] = {
    torch.optim.SGD: _Kind("sgd", (), {"momentum": "momentum"}, counts=False),
    torch.optim.AdamW: _Kind("adamw", ("exp_avg", "exp_avg_sq"), {}),
    torch.optim.Adam: _Kind("adam", ("exp_avg", "exp_avg_sq"), {}),
    torch.optim.RMSprop: _Kind("rmsprop", ("square_avg",), {"momentum": "momentum", "centered": "grad_avg"}),
    torch.optim.Adagrad: _Kind("adagrad", ("sum",), {}),
    LionOptimizer: _Kind("lion", ("exp_avg",), {}, counts=False),
}
_WORDS: Final = ("betas", "eps", "weight_decay", "momentum", "nesterov", "alpha", "centered", "lr_decay")
_FORMULA: Final = {"amsgrad": False, "dampening": 0.0, "maximize": False}
"""Options that change the formula, and the value at which they do not."""


def slots_of(
    paths: Iterable[str], slots: Iterable[str], *, counts: bool
) -> tuple[dict[str, dict[str, str]], dict[str, Count]]:
    """Names of the arrays that a checkpoint holds of an optimizer: slot -> path -> array, and the counts.

    >>> slots_of(["head/bias"], ["momentum"], counts=False)[0]
    {'momentum': {'head/bias': 'optimizer/state/head/bias/momentum_buffer'}}
    """
    paths = list(paths)
    named = {slot: {path: f"optimizer/state/{path}/{slot_name(slot)}" for path in paths} for slot in slots}
    return named, {path: Count(f"optimizer/state/{path}/step") for path in paths} if counts else {}


def layout_of(optimizer: torch.optim.Optimizer, paths: Mapping[int, str]) -> OptimizerLayout:
    """Which arrays of an optimizer of torch's own are what.

    Args:
        optimizer: the optimizer; what its schedulers do to its rates is state of theirs.
        paths: id of a parameter -> path, of those that are trained.
    """
    kind = next((found for known, found in _KINDS.items() if isinstance(optimizer, known)), None)
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if kind is None:
        refused = [f"it is trained by {name}, of which polyamp knows no formula"]
        return OptimizerLayout({}, {}, [{"type": name}], dict.fromkeys(paths.values(), 0), refused=refused)
    distinct, refused = [], []
    numbers: dict[str, int] = {}
    slots = dict.fromkeys(kind.slots)
    for index, group in enumerate(optimizer.param_groups):
        settings = _settings(kind.type, group)
        distinct.append(settings)
        numbers |= {paths[id(p)]: index for p in group["params"] if id(p) in paths}
        slots |= {slot: None for option, slot in kind.sometimes.items() if group.get(option)}
        refused += [
            f"{option}={group[option]!r} in parameter group {index} of {name}"
            for option, plain in _FORMULA.items()
            if group.get(option, plain) != plain
        ]
    named, counts = slots_of(paths.values(), slots, counts=kind.counts)
    return OptimizerLayout(named, counts, distinct, numbers, refused=refused)


def _settings(kind: str, group: Mapping[str, Any]) -> dict[str, Any]:
    decoupled = group.get("decoupled_weight_decay")
    if kind == "adam" and decoupled:
        kind = "adamw"
    found = {"type": kind, "learning_rate": float(group["lr"])}
    for word in _WORDS:
        if word in group:
            value = group[word]
            found[word] = [float(item) for item in value] if isinstance(value, tuple | list) else value
    return found

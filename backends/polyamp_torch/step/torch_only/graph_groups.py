"""Parameter groups of an optimizer as constants of a compiled graph (S27)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from polyamp.recipe.optimizers import OptimizerSpec
from polyamp.rules.clip import ClipSet, GradientClip, clip_gradients
from polyamp_torch.arrays import XP
from polyamp_torch.step import optimizers
from polyamp_torch.step.grad_stats import global_norm_and_finite
from polyamp_torch.step.state import TorchState


class GraphGroups(NamedTuple):
    """Options of an optimizer's parameter groups, which are constants in a graph.

    Attributes:
        specs: the spec of each group, with the group's options.
        numbers: path of a parameter -> its group.
        starts: path of a parameter -> number of applied updates before its first, where it is not 0.
        common_clip: how all gradients are clipped together.
        sets: which parameters are clipped together, by their indices in `order`, if not all are.
        order: paths of the parameters.
    """

    specs: list[OptimizerSpec]
    numbers: dict[str, int]
    starts: dict[str, int]
    common_clip: GradientClip
    sets: list[ClipSet]
    order: list[str]

    @classmethod
    def of(cls, state: TorchState) -> GraphGroups:
        """Return a state's current options."""
        groups, starts = state.optimizer.param_groups, dict(state.groups.starts)
        sets = state.groups.clip_sets(state.recipe.clip) if state.common_clip.apart else []
        clips = (state.common_clip, sets, list(state.parameters))
        if len(groups) == 1:
            return cls([optimizers.current_spec(state.groups.distinct[0].spec, groups[0])], {}, starts, *clips)
        found = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        specs = [
            optimizers.current_spec(optimizers.group_spec(state.groups, n), group) for n, group in enumerate(groups)
        ]
        return cls(specs, {name: found[id(p)] for name, p in state.parameters.items()}, starts, *clips)

    def trains(self, names: list[str], step: torch.Tensor) -> list[torch.Tensor | None]:
        """Return whether each parameter takes the update after `step` applied ones; None for always."""
        return [step >= self.starts[name] if name in self.starts else None for name in names]

    def clip(self, names: list[str], grads: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the unscaled gradients of these parameters, clipped; the divisor has a common factor already."""
        if self.common_clip.transformation is not None:
            return [self.common_clip.transformation(grad, XP) for grad in grads]
        if not self.common_clip.apart:
            return grads
        known = dict(zip(names, grads, strict=True))
        every = [known.get(name) for name in self.order]

        def norm_of(places: list[int]) -> torch.Tensor:
            own = [grad for place in places if (grad := every[place]) is not None]
            return global_norm_and_finite(own, alike=True).norm

        clipped = dict(zip(self.order, clip_gradients(self.sets, every, None, norm_of, XP), strict=True))
        return [clipped[name] for name in names]


def zero_unless(trains: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    """Return a gradient, or zeros if its parameter does not train."""
    return value if trains is None else torch.where(trains, value, torch.zeros_like(value))


def both(finite: torch.Tensor | None, trains: torch.Tensor | None) -> torch.Tensor | None:
    """Return the conjunction of two flags, of which None is True."""
    if finite is None or trains is None:
        return finite if trains is None else trains
    return finite & trains

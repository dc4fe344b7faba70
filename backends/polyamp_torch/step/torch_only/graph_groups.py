"""Parameter groups of an optimizer as constants of a compiled graph (S27)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from polyamp.recipe.clip_limits import ClipLimits
from polyamp.recipe.optimizers import OptimizerSpec
from polyamp.rules import clip
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
        clips: limits with the parameters that are clipped together by them; empty if no group has limits of its own.
    """

    specs: list[OptimizerSpec]
    numbers: dict[str, int]
    starts: dict[str, int]
    clips: list[tuple[ClipLimits, frozenset[str]]]

    @classmethod
    def of(cls, state: TorchState) -> GraphGroups:
        """Return a state's current options."""
        groups, starts = state.optimizer.param_groups, dict(state.groups.starts)
        names = list(state.parameters)
        sets = state.groups.clip_sets(state.recipe.clip) if state.groups.has_clips else []
        clips = [(limits, frozenset(names[place] for place in places)) for limits, places in sets]
        if len(groups) == 1:
            return cls([optimizers.current_spec(state.groups.distinct[0].spec, groups[0])], {}, starts, clips)
        found = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        specs = [
            optimizers.current_spec(optimizers.group_spec(state.groups, n), group) for n, group in enumerate(groups)
        ]
        return cls(specs, {name: found[id(p)] for name, p in state.parameters.items()}, starts, clips)

    def trains(self, names: list[str], step: torch.Tensor) -> list[torch.Tensor | None]:
        """Return whether each parameter takes the update after `step` applied ones; None for always."""
        return [step >= self.starts[name] if name in self.starts else None for name in names]

    def clip(self, names: list[str], grads: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the unscaled gradients of these parameters, those of each set clipped by its own limits."""
        clipped = list(grads)
        for limits, members in self.clips:
            own = [place for place, name in enumerate(names) if name in members]
            if limits.norm is not None and own:
                norm = global_norm_and_finite([grads[place] for place in own], alike=True).norm
                factor = clip.clip_factor(norm, limits.norm, XP, limits.eps)
                for place in own:
                    clipped[place] = grads[place] * factor.to(grads[place].dtype)
            elif limits.value is not None:
                for place in own:
                    clipped[place] = grads[place].clamp(-limits.value, limits.value)
        return clipped


def zero_unless(trains: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    """Return a gradient, or zeros if its parameter does not train."""
    return value if trains is None else torch.where(trains, value, torch.zeros_like(value))


def both(finite: torch.Tensor | None, trains: torch.Tensor | None) -> torch.Tensor | None:
    """Return the conjunction of two flags, of which None is True."""
    if finite is None or trains is None:
        return finite if trains is None else trains
    return finite & trains

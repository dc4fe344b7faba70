"""polyamp's optimizers on MLX arrays; their formulas are polyamp's own, over an array namespace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from polyamp.results import Gradients
from polyamp.rules import clip
from polyamp.rules.group_members import GroupMembers
from polyamp.rules.update_decision import GradStats
from polyamp_mlx.arrays import XP
from polyamp_mlx.step.grad_stats import global_norm_and_finite
from polyamp_mlx.step.state import Arrays, MLXState


def initial_slots(groups: GroupMembers, parameters: Arrays) -> dict[str, Arrays]:
    """Return the initial optimizer slots of each parameter, float32."""

    def made(spec: Any, value: mx.array) -> Arrays:
        return {
            slot: mx.full(spec.slot_shape(slot, value.shape), spec.initial(slot), mx.float32) for slot in spec.slots
        }

    return {path: made(groups.of(path).spec, value) for path, value in parameters.items()}


def update_parameters(
    state: MLXState, grads: Gradients, measured: GradStats, chosen: Callable[[mx.array, mx.array], mx.array]
) -> tuple[Arrays, dict[str, Arrays], Arrays]:
    """Return parameters, slots and counts after an update by the clipped gradients.

    Parameters without a gradient are unchanged (S23).

    Args:
        state: before the update.
        grads: unscaled.
        measured: norm and flag of these gradients.
        chosen: (new, old) -> the one that the step's decision selects.
    """
    recipe = state.recipe
    paths = list(state.groups.numbers)
    wanted = [None if grads.values[path] is None else grads.values[path].astype(mx.float32) for path in paths]

    def norm_of(places: list[int]) -> mx.array:
        own = {paths[place]: wanted[place] for place in places}
        return global_norm_and_finite(grads._replace(values=own)).norm

    made = clip.clip_gradients(state.groups.clip_sets(recipe.clip), wanted, measured.norm, norm_of, XP)
    clipped = dict(zip(paths, made, strict=True))
    rates = [member.rate(state.step, XP) for member in state.groups.distinct]
    parameters, kept, counts = dict(state.parameters), dict(state.slots), dict(state.counts)
    for path, value in grads.values.items():
        if value is None:
            continue
        old, count = parameters[path], counts[path] + 1
        wide, grad = old.astype(mx.float32), clipped[path]
        spec, rate = state.groups.of(path).spec, rates[state.groups.numbers[path]]
        new, moved = spec.update(XP, wide, grad, kept[path], rate, count.astype(mx.float32))
        parameters[path] = chosen(new, old)
        kept[path] = {slot: chosen(moved[slot], before) for slot, before in kept[path].items()}
        counts[path] = chosen(count, counts[path])
    return parameters, kept, counts

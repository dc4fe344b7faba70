"""Clipping of unscaled gradients in place, by the rules of `polyamp.rules.clip` (S11, S27)."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Final

import torch

from polyamp.array_namespace import ArrayNamespace
from polyamp.rules.clip import plan_clips
from polyamp_torch.arrays import XP, can_read_without_sync
from polyamp_torch.compat import foreach_clamp_max_, foreach_clamp_min_, foreach_copy_
from polyamp_torch.step.grad_stats import bucket_by_device_and_dtype, divide_gradients_, unscale_then_clip_
from polyamp_torch.step.state import TorchState
from polyamp_torch.step.torch_only.replica_norms import global_norms
from polyamp_torch.step.torch_only.spec_formulas import TENSOR_LIST_XP, TensorList

SAFE_SCALE_RANGE: Final = (2.0**-100, 2.0**100)
"""Range of the divisors whose quotients are as exact as float32 allows."""


def _clamp_(x: TensorList, low: float, high: float) -> TensorList:
    foreach_clamp_min_(x.tensors, low)
    foreach_clamp_max_(x.tensors, high)
    return x


_IN_PLACE_XP: Final[Any] = types.SimpleNamespace(**{**vars(TENSOR_LIST_XP), "clip": _clamp_})
"""The namespace of tensor lists that a clip may overwrite."""


def transform_gradients_(
    grads: list[torch.Tensor], transformation: Callable[[Any, ArrayNamespace], Any], *, alike: bool = False
) -> None:
    """Clip gradients in place by a function of each (S11); see `GradientClip.transformation`."""
    for bucket in [grads] if alike else bucket_by_device_and_dtype(grads):
        made = transformation(TensorList(bucket), _IN_PLACE_XP)
        if made.tensors is not bucket:
            foreach_copy_(bucket, made.tensors)


def clip_sets_(state: TorchState, parameters: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Clip the unscaled gradients of each set in place, by its own limits (S27)."""
    known = {id(p): value for p, value in zip(parameters, values, strict=True)}
    every: list[torch.Tensor] = list(state.parameters.values())
    grads: list[Any] = [known.get(id(p)) for p in every]

    def norms_of(sets: list[list[int]]) -> list[torch.Tensor]:
        members = [([every[place] for place in places], [grads[place] for place in places]) for places in sets]
        return global_norms(state.replicas, members, alike=state.one_device)

    sets, present = state.groups.clip_sets(state.recipe.clip), [grad is not None for grad in grads]
    for places, factor, transformation in plan_clips(sets, present, None, norms_of, XP):
        own = [grads[place] for place in places]
        if factor is not None and can_read_without_sync(state.device) and factor.item() < 1.0 / SAFE_SCALE_RANGE[1]:
            unscale_then_clip_(own, None, factor)
        elif factor is not None:
            divide_gradients_(own, factor.reciprocal(), alike=state.one_device)
        if transformation is not None:
            transform_gradients_(own, transformation, alike=state.one_device)

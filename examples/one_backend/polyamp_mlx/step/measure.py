"""Gradients divided by the scale, their norm, and whether all are finite: S7, S10, S11."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from polyamp.errors import GradientError
from polyamp.results import Gradients
from polyamp.rules import refusals
from polyamp.rules.decide import Measured
from polyamp.trees import leaves, map_tree
from polyamp_mlx.arrays import is_floating
from polyamp_mlx.step.state import MLXState


def divided(grads: Any, scale: Any | None) -> Any:
    """A tree of gradients in float32, divided by the scale unless that is None; None stays None."""

    def one(leaf: Any) -> Any:
        if leaf is None:
            return None
        if not is_floating(leaf):
            raise GradientError(f"gradients must be floating arrays. Received: {leaf!r}.")
        wide = leaf.astype(mx.float32)
        return wide if scale is None else wide / scale

    return map_tree(one, grads)


def unscaled(grads: Gradients, maker: MLXState) -> Gradients:
    """The gradients of the unscaled loss; `maker` is the state whose scale they were made with."""
    scale = maker.scale_state.scale if maker.recipe.loss_scaler.scales else None
    return grads._replace(values=divided(grads.values, scale))


def all_finite(grads: Any) -> mx.array:
    """Whether a tree of gradients holds neither an infinity nor NaN, one scalar on the device."""
    values = [leaf for _, leaf in leaves(grads) if leaf is not None]
    refusals.check_any(values, who="unscale()")
    return mx.all(mx.stack([mx.all(mx.isfinite(value)) for value in values]))


def measured(grads: Gradients) -> Measured:
    """Flag and norm. Squares of large and of small gradients leave float32, so the norm is taken of the gradients over
    their largest magnitude."""
    values = [value.astype(mx.float32) for value in grads.values.values() if value is not None]
    finite = all_finite(values)
    largest = mx.max(mx.stack([mx.max(mx.abs(value)) for value in values]))
    unit = mx.where(finite & (largest > 0), largest, 1.0)
    squares = mx.stack([mx.sum(mx.square(value / unit)) for value in values])
    return Measured(unit * mx.sqrt(mx.sum(squares)), finite, weight=grads.weight)

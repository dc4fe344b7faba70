"""Unscaling of gradients, their global norm, and whether all are finite: S7, S10, S11."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from polyamp.errors import GradientError
from polyamp.results import Gradients
from polyamp.rules import step_checks
from polyamp.rules.update_decision import GradStats
from polyamp.trees import leaves, map_tree
from polyamp_mlx.arrays import is_floating
from polyamp_mlx.step.state import MLXState


def unscale_tree(grads: Any, scale: Any | None) -> Any:
    """Return a tree of gradients in float32, divided by the scale unless that is None; None stays None."""

    def one(leaf: Any) -> Any:
        if leaf is None:
            return None
        if not is_floating(leaf):
            raise GradientError(f"gradients must be floating arrays. Received: {leaf!r}.")
        wide = leaf.astype(mx.float32)
        return wide if scale is None else wide / scale

    return map_tree(one, grads)


def unscale_gradients(grads: Gradients, maker: MLXState) -> Gradients:
    """Return the gradients of the unscaled loss; `maker` is the state whose scale they include."""
    scale = maker.scale_state.scale if maker.recipe.loss_scaler.scales else None
    return grads._replace(values=unscale_tree(grads.values, scale))


def all_finite(grads: Any) -> mx.array:
    """Return whether all gradients of a tree are finite, as a scalar on the device."""
    values = [leaf for _, leaf in leaves(grads) if leaf is not None]
    step_checks.check_any_gradient(values, who="unscale()")
    return mx.all(mx.stack([mx.all(mx.isfinite(value)) for value in values]))


def global_norm_and_finite(grads: Gradients) -> GradStats:
    """Return the global norm and whether all gradients are finite.

    Squares of large and small gradients exceed float32's range, so gradients are divided by their largest magnitude.
    """
    values = [value.astype(mx.float32) for value in grads.values.values() if value is not None]
    finite = all_finite(values)
    largest = mx.max(mx.stack([mx.max(mx.abs(value)) for value in values]))
    unit = mx.where(finite & (largest > 0), largest, 1.0)
    squares = mx.stack([mx.sum(mx.square(value / unit)) for value in values])
    return GradStats(unit * mx.sqrt(mx.sum(squares)), finite, weight=grads.weight)

"""The first half of a step: a batch as MLX's arrays, and the loss with its gradients (S6, S8, S23, S24, S26)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from polyamp.errors import UnsupportedError
from polyamp.results import Gradients, LossFunction
from polyamp.rules import refusals, weights
from polyamp.rules.batches import check_has_rows, host_array
from polyamp.rules.weights import Loss
from polyamp.trees import leaves, map_tree
from polyamp_mlx.arrays import XP, dtype_name, to_device
from polyamp_mlx.precision.bound import Bound, arrays_of, with_arrays
from polyamp_mlx.step.dependence import used_by
from polyamp_mlx.step.state import Arrays, MLXState
from polyamp_mlx.step.streams import stream


def entered(batch: Any, param: str) -> Any:
    """A batch as it goes into a step: with rows (S24), NumPy's arrays as MLX's, their float64 as float32 (S26)."""
    arrays = (mx.array, np.ndarray)
    check_has_rows(leaf.shape[0] for _, leaf in leaves(batch) if isinstance(leaf, arrays) and leaf.ndim)
    numbers = (np.ndarray, np.generic)
    return map_tree(lambda leaf: to_device(host_array(leaf, param)) if isinstance(leaf, numbers) else leaf, batch)


def differentiated(
    loss_fn: LossFunction, states: Sequence[MLXState], batch: Any, draw: int, **how: Any
) -> tuple[Loss, list[Gradients]]:
    """The loss in float32, with what came beside it and what it is a mean over, and each state's gradients.

    The loss is multiplied by the first state's scale, and so are the gradients, which are float32 and still to be
    divided (`measure`). A parameter on which the loss does not depend has None (S23).

    Args:
        loss_fn: sees one model, or a tuple of models.
        states: of the models.
        batch: as `entered` gives it.
        draw: number of the random stream (S12).
        **how: for `polyamp.rules.weights.read`.
    """
    found: list[Any] = []

    def run(trees: list[Arrays]) -> mx.array:
        modules = [with_arrays(s.module, {**tree, **s.running}, s.plan) for s, tree in zip(states, trees, strict=True)]
        models = [Bound(module, s.plan, tree) for module, s, tree in zip(modules, states, trees, strict=True)]
        before = [arrays_of(module)[0] for module in modules]
        result, means = weights.call(loss_fn, models[0] if len(models) == 1 else tuple(models), batch)
        for module, arrays in zip(modules, before, strict=True):
            _check_unwritten(arrays, arrays_of(module)[0])
        read = weights.read(result, means, XP, **how)
        if "rows" in how and weights.is_unclear(read, means):
            weights.warn_unclear(loss_fn, weights.line_of(means))
        loss = read.value
        used = used_by(loss, trees)
        refusals.check_depends(bool(used))
        refusals.check_loss(loss.shape, dtype_name(loss))
        wide = loss.reshape(()).astype(mx.float32)
        if read.weight is not None:  # a mean over nothing
            read = read._replace(weight=_constant(read.weight))
            wide = mx.where(read.weight > 0.0, wide, 0.0)
        found[:] = read._replace(value=wide), used, [arrays_of(module)[1] for module in modules]
        return wide * states[0].scale_state.scale if states[0].recipe.loss_scaler.scales else wide

    with stream(states[0].seed, draw):
        trees = mx.grad(run)([state.parameters for state in states])
    read, used, running = found
    values = [
        {path: g.astype(mx.float32) if f"{i}/{path}" in used else None for path, g in tree.items()}
        for i, tree in enumerate(trees)
    ]
    pairs = zip(values, running, strict=True)
    return read, [Gradients(*pair, read.value, read.weight) for pair in pairs]


def _check_unwritten(before: Arrays, after: Arrays) -> None:
    """Refuse a forward pass that writes to a parameter: it is written to in a copy, and would be lost (S12)."""
    for path, array in before.items():
        if after.get(path) is not array:
            raise UnsupportedError(
                f"the forward pass wrote to the parameter {path!r}, which the mlx backend cannot keep. Compute with "
                "the new value without writing it back, or freeze() the parameter, which makes it running state."
            )


def _constant(weight: Any) -> mx.array:
    """A number or a scalar in float32, without a gradient."""
    return mx.stop_gradient(mx.array(weight, mx.float32) if isinstance(weight, float) else weight.astype(mx.float32))

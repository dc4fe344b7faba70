"""The first half of a step: a batch as MLX's arrays, and the loss with its gradients (S6, S8, S23, S24, S26)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from polyamp.results import Gradients, LossFunction
from polyamp.rules import refusals
from polyamp.rules.batches import check_has_rows, host_array
from polyamp.trees import leaves, map_tree
from polyamp_mlx.arrays import dtype_name, to_device
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
    loss_fn: LossFunction, states: Sequence[MLXState], batch: Any, draw: int, share: float = 1.0
) -> tuple[mx.array, Any, list[Gradients]]:
    """The loss in float32, what `loss_fn` returned beside it, and each state's gradients.

    The loss is multiplied by the first state's scale, and so are the gradients, which are float32 and still to be
    divided (`measure`). A parameter on which the loss does not depend has None (S23).

    Args:
        loss_fn: sees one model, or a tuple of models.
        states: of the models.
        batch: as `entered` gives it.
        draw: number of the random stream (S12).
        share: what a micro-batch weighs (S8); the gradients hold it, the loss does not.
    """
    found: list[Any] = []

    def run(trees: list[Arrays]) -> mx.array:
        modules = [with_arrays(s.module, {**tree, **s.running}, s.plan) for s, tree in zip(states, trees, strict=True)]
        models = [Bound(module, s.plan, tree) for module, s, tree in zip(modules, states, trees, strict=True)]
        loss, aux = refusals.split_result(loss_fn(models[0] if len(models) == 1 else tuple(models), batch))
        used = used_by(loss, trees)
        refusals.check_depends(bool(used))
        refusals.check_loss(loss.shape, dtype_name(loss))
        wide = loss.reshape(()).astype(mx.float32)
        found[:] = wide, aux, used, [arrays_of(module)[1] for module in modules]
        return (wide * states[0].scale_state.scale if states[0].recipe.loss_scaler.scales else wide) * share

    with stream(states[0].seed, draw):
        trees = mx.grad(run)([state.parameters for state in states])
    wide, aux, used, running = found
    values = [
        {path: g.astype(mx.float32) if f"{i}/{path}" in used else None for path, g in tree.items()}
        for i, tree in enumerate(trees)
    ]
    return wide, aux, [Gradients(*pair, wide) for pair in zip(values, running, strict=True)]

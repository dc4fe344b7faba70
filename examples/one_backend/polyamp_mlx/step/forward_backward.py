"""First half of a step: the batch as MLX arrays, and the loss with its gradients (S6, S8, S23, S24, S26)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from polyamp.errors import UnsupportedError
from polyamp.results import Gradients, LossFunction
from polyamp.rules import loss_weights, step_checks
from polyamp.rules.batches import check_has_rows, host_array
from polyamp.rules.loss_weights import LossOutput
from polyamp.trees import leaves, map_tree
from polyamp_mlx.arrays import XP, dtype_name, to_device
from polyamp_mlx.precision.policy_module import PolicyModule, module_arrays, replace_arrays
from polyamp_mlx.step.random_streams import random_stream
from polyamp_mlx.step.state import Arrays, MLXState
from polyamp_mlx.step.unused_parameters import find_used_parameters


def prepare_batch(batch: Any, param: str) -> Any:
    """Check that a batch is not empty (S24) and convert NumPy arrays to MLX, float64 to float32 (S26)."""
    arrays = (mx.array, np.ndarray)
    check_has_rows(leaf.shape[0] for _, leaf in leaves(batch) if isinstance(leaf, arrays) and leaf.ndim)
    numbers = (np.ndarray, np.generic)
    return map_tree(lambda leaf: to_device(host_array(leaf, param)) if isinstance(leaf, numbers) else leaf, batch)


def loss_and_gradients(
    loss_fn: LossFunction, states: Sequence[MLXState], batch: Any, draw: int, **how: Any
) -> tuple[LossOutput, list[Gradients]]:
    """Return the loss in float32, with its aux and its count, and each state's gradients.

    The gradients are float32 and still multiplied by the first state's scale (`grad_stats` divides them). A parameter
    on which the loss does not depend has None (S23).

    Args:
        loss_fn: called with one model, or a tuple of models.
        states: of the models.
        batch: from `prepare_batch`.
        draw: number of the random stream (S12).
        **how: for `polyamp.rules.loss_weights.parse_loss_output`.
    """
    found: list[Any] = []

    def run(trees: list[Arrays]) -> mx.array:
        modules = [
            replace_arrays(s.module, {**tree, **s.running}, s.plan) for s, tree in zip(states, trees, strict=True)
        ]
        models = [PolicyModule(module, s.plan, tree) for module, s, tree in zip(modules, states, trees, strict=True)]
        before = [module_arrays(module)[0] for module in modules]
        result, means = loss_weights.call_loss_fn(loss_fn, models[0] if len(models) == 1 else tuple(models), batch)
        for module, arrays in zip(modules, before, strict=True):
            _check_no_writes(arrays, module_arrays(module)[0])
        read = loss_weights.parse_loss_output(result, means, XP, **how)
        if "rows" in how and loss_weights.has_unclear_count(read, means):
            loss_weights.warn_unclear_count(loss_fn, loss_weights.count_line(means))
        loss = read.value
        used = find_used_parameters(loss, trees)
        step_checks.check_loss_dependence(bool(used))
        step_checks.check_loss(loss.shape, dtype_name(loss))
        wide = loss.reshape(()).astype(mx.float32)
        if read.weight is not None:  # a mean over nothing
            read = read._replace(weight=_constant(read.weight))
            wide = mx.where(read.weight > 0.0, wide, 0.0)
        found[:] = read._replace(value=wide), used, [module_arrays(module)[1] for module in modules]
        return wide * states[0].scale_state.scale if states[0].recipe.loss_scaler.scales else wide

    with random_stream(states[0].seed, draw):
        trees = mx.grad(run)([state.parameters for state in states])
    read, used, running = found
    values = [
        {path: g.astype(mx.float32) if f"{i}/{path}" in used else None for path, g in tree.items()}
        for i, tree in enumerate(trees)
    ]
    pairs = zip(values, running, strict=True)
    return read, [Gradients(*pair, read.value, read.weight) for pair in pairs]


def _check_no_writes(before: Arrays, after: Arrays) -> None:
    """Raise if a forward pass writes to a parameter: it writes to a copy, so the write would be lost (S12)."""
    for path, array in before.items():
        if after.get(path) is not array:
            raise UnsupportedError(
                f"the forward pass wrote to the parameter {path!r}, which the mlx backend cannot keep. Compute with "
                "the new value without writing it back, or freeze() the parameter, which makes it running state."
            )


def _constant(weight: Any) -> mx.array:
    """Return a number or a scalar in float32, without a gradient."""
    return mx.stop_gradient(mx.array(weight, mx.float32) if isinstance(weight, float) else weight.astype(mx.float32))

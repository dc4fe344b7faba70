"""Default loss of a comparison: the mean squared distance of every output from fixed random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from polyamp import losses
from polyamp.errors import LossError, describe_value
from polyamp.porting.layouts.inventory import Inventory
from polyamp.results import LossFunction
from polyamp.trees import leaves


def random_target_loss(inventory: Inventory) -> LossFunction:
    """Return a loss function: the sum over a model's outputs of their mean squared distance from random numbers.

    The numbers depend only on the outputs' shapes. The batch is the model's input: an array, a tuple of arguments or a
    mapping of keywords.

    Args:
        inventory: of the model; provides its channel order.
    """
    rank = inventory.spatial + 2 if inventory.spatial and inventory.channels == "first" else 0

    def loss_fn(model: Any, batch: Any) -> Any:
        args, kwargs = (
            ((), batch) if isinstance(batch, Mapping) else (batch if isinstance(batch, tuple) else (batch,), {})
        )
        try:
            given = model(*args, **kwargs)
        except TypeError as error:
            raise LossError(
                f"without loss_fn the batch is the model's input, and the model does not take it: {error}. A mapping "
                "is given as keywords, a tuple as arguments, anything else as the one argument; a model whose one "
                "argument is a mapping (Keras's with named inputs) is given (mapping,). Received: "
                f"{describe_value(batch)}."
            ) from error
        found = [leaf for _, leaf in leaves(given) if "float" in str(getattr(leaf, "dtype", ""))]
        if not found:
            raise LossError(f"the model's output has no floating array to compare. Received: {describe_value(given)}.")
        terms = [
            losses.mean_squared_error(leaf, _random_targets(tuple(int(n) for n in leaf.shape), rank)) for leaf in found
        ]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total

    return loss_fn


def _random_targets(shape: tuple[int, ...], rank: int) -> Any:
    common = (shape[0], *shape[2:], shape[1]) if rank and len(shape) == rank else shape
    made = np.random.default_rng(list(common)).standard_normal(common, np.float32)
    return np.ascontiguousarray(np.moveaxis(made, -1, 1)) if common != shape else made

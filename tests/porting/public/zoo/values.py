"""Values for fresh models: biases, scales and statistics that are not zeros and ones, so that mistakes in them show."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.porting.public.zoo.case import Array
from tests.porting.public.zoo.judge import is_keras, is_torch


def changed(name: str, value: Array, rng: np.random.Generator) -> Array:
    """The value of a variable in a model that was trained: kernels as they are, vectors moved."""
    if value.dtype.kind != "f" or value.ndim == 0:
        return value
    if "var" in name.rpartition("/")[2]:
        return rng.uniform(0.5, 2.0, value.shape).astype(np.float32)
    if value.ndim == 1 or not value.any():
        return (value + 0.1 * rng.standard_normal(value.shape)).astype(np.float32)
    return value


def enter(model: Any, seed: int = 0) -> Any:
    """The model with such values, for inference."""
    rng = np.random.default_rng(seed)
    if is_torch(model):
        import torch

        with torch.no_grad():
            for name, value in [*model.named_parameters(), *model.named_buffers()]:
                if value.is_floating_point() and not name.endswith(("inv_freq", "slopes")):
                    value.copy_(torch.tensor(changed(name.replace(".", "/"), value.numpy(), rng)))
        return model.eval()
    if is_keras(model):
        for each in model.weights:
            if "seed" not in each.path:
                each.assign(changed(each.path, np.asarray(each), rng))
        return model
    import jax

    def new(path: Any, value: Any) -> Any:
        if not hasattr(value, "dtype") or jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            return value
        return jax.numpy.asarray(
            changed(jax.tree_util.keystr(path, simple=True, separator="/"), np.asarray(value), rng)
        )

    if isinstance(model, tuple):
        return (model[0], jax.tree_util.tree_map_with_path(new, model[1]))
    from flax import nnx

    if isinstance(model, nnx.Module):
        graph, state = nnx.split(model)
        return nnx.merge(graph, jax.tree_util.tree_map_with_path(new, state))
    return jax.tree_util.tree_map_with_path(new, model)

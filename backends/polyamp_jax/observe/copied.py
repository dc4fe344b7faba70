"""A model that belongs to a comparison alone. Called by `observer`."""

from __future__ import annotations

from typing import Any

from polyamp_jax import compat


def nnx_copy(model: Any) -> Any:
    """A copy of an nnx module; every other library's models are values, which nothing changes."""
    return compat.loaded("flax.nnx").clone(model) if compat.is_a(model, "flax.nnx", "Module") else model

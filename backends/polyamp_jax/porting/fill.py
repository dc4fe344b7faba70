"""A new model with other values in its arrays, of the same structure and sharding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from polyamp.errors import PortError
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp_jax.porting.jax_only.lazy_leaves import array_like
from polyamp_jax.porting.libraries.porting_library import find_library
from polyamp_jax.porting.libraries.stacked_layers import gather_slices


def fill(model: Any, leaves: Mapping[str, Lazy]) -> Any:
    """Return a model with these values in the leaves of these names; see `Converter.fill`.

    Raises:
        PortError: the model has no such name, or a shape or dtype differs.
    """
    of = find_library(model)
    there = of.arrays(model)
    made = {}
    for name, values in gather_slices(leaves, there).items():
        if name not in there:
            raise PortError(f"the model has no array {name!r}.")
        like = there[name]
        if tuple(like.shape) != values.shape or np.dtype(like.dtype) != values.dtype:
            raise PortError(
                f"{name!r} is {np.dtype(like.dtype)}{list(like.shape)} in the model. Received: "
                f"{values.dtype}{list(values.shape)}."
            )
        made[name] = array_like(like, values.read())
    return of.replace_arrays(model, made)

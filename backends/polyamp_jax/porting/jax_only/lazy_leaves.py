"""Conversion of JAX arrays to lazy NumPy arrays, and back with the sharding of the previous leaf."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.errors import PortError
from polyamp.porting.files.strided_copies import aligned_copy
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp_jax.arrays import is_key


def is_movable(leaf: Any) -> bool:
    """Return whether a leaf is an array of numbers or the shape of one, so no random key or Python object."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not is_key(leaf)


def to_lazy(name: str, leaf: Any) -> Lazy:
    """Return the values of a leaf as a lazy array; on a CPU without a copy."""
    if isinstance(leaf, Lazy):
        return leaf

    def read() -> np.ndarray[Any, Any]:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise PortError(
                f"{name!r} is a shape without values (jax.ShapeDtypeStruct): such a model can be filled, not read. "
                "Pass one whose variables were made."
            )
        if not isinstance(leaf, jax.Array) or all(device.platform == "cpu" for device in leaf.devices()):
            return np.asarray(leaf)
        # a JAX array caches its host copy for its whole lifetime
        return np.asarray(jnp.array(leaf, copy=True))

    return Lazy(tuple(leaf.shape), leaf.dtype, read)


def array_like(leaf: Any, values: np.ndarray[Any, Any]) -> Any:
    """Return a new array of these values with the sharding of `leaf`, or only its dtype if it is a NumPy array."""
    if isinstance(leaf, np.ndarray | np.generic):
        return np.array(values, leaf.dtype)
    sharding = leaf.sharding
    placed = isinstance(sharding, jax.sharding.Sharding) and getattr(leaf, "committed", True)
    # on the CPU JAX aliases contiguous and aligned memory, whatever `may_alias` says. That memory may be the source's,
    # so training the source would change this array
    return jax.device_put(aligned_copy(values), sharding if placed else None)

"""JAX arrays as lazy NumPy ones, and back under the sharding of what was there. Called by all of this room."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.errors import PortError
from polyamp.porting.files.copies import fresh
from polyamp.porting.layouts.lazy import Lazy
from polyamp_jax.arrays import is_key


def movable(leaf: Any) -> bool:
    """Whether a leaf is an array of numbers, or the shape of one: no random key, no Python object."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not is_key(leaf)


def lazy(name: str, leaf: Any) -> Lazy:
    """The values of a leaf, read late; on a CPU without a copy."""
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
        # an array keeps what was read of it on the host for as long as it lives
        return np.asarray(jnp.array(leaf, copy=True))

    return Lazy(tuple(leaf.shape), leaf.dtype, read)


def array_like(leaf: Any, values: np.ndarray[Any, Any]) -> Any:
    """A new array of these values where `leaf` is: with its sharding, or its dtype alone if it is a NumPy array."""
    if isinstance(leaf, np.ndarray | np.generic):
        return np.array(values, leaf.dtype)
    sharding = leaf.sharding
    placed = isinstance(sharding, jax.sharding.Sharding) and getattr(leaf, "committed", True)
    # on the CPU JAX takes over memory that is contiguous and aligned, whatever `may_alias` says: the source's own, so
    # that whoever trains the source would change this
    return jax.device_put(fresh(values), sharding if placed else None)

"""Base keys of a model's random streams, derived from the `rngs` argument of `init`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from polyamp.errors import UnsupportedError
from polyamp_jax import compat
from polyamp_jax.arrays import is_array, is_key
from polyamp_jax.models.adapter import ModelAdapter


def random_keys(rngs: Any, adapter: ModelAdapter) -> dict[str, jax.Array]:
    """Return the base keys of a model's random streams, derived from `rngs`.

    Args:
        rngs: None, a mapping from stream name to seed or key, an `nnx.Rngs`, or a bare seed or key if the adapter has
            a default stream name.

    Raises:
        UnsupportedError: something else.
    """
    if rngs is None:
        return {}
    if compat.is_a(rngs, "flax.nnx", "Rngs"):  # the next keys of its streams; `rngs` is not changed
        rngs = {name: jax.random.fold_in(stream.key[...], stream.count[...]) for name, stream in rngs.items()}
    if not isinstance(rngs, Mapping):
        if adapter.stream is None:
            raise UnsupportedError(
                f"rngs must map stream names to seeds or keys, such as rngs={{'dropout': 0}}. Received: rngs={rngs!r}."
            )
        rngs = {adapter.stream: rngs}
    adapter.check_streams(rngs)
    return {str(name): _random_key(name, seed) for name, seed in rngs.items()}


def _random_key(name: Any, seed: Any) -> jax.Array:
    if isinstance(seed, int) and not isinstance(seed, bool):
        return jax.random.key(seed)
    if is_key(seed) and seed.shape == ():
        return seed  # type: ignore[no-any-return]  # is_key says that it is a jax.Array
    if is_array(seed) and str(seed.dtype) == "uint32" and seed.ndim == 1:
        return jnp.asarray(seed)
    raise UnsupportedError(f"rngs[{name!r}] must be an integer seed or one PRNG key. Received: {seed!r}.")

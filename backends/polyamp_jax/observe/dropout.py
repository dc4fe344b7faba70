"""`disable_dropout`: context manager that turns dropout off or feeds it given random numbers.

JAX traces from outside the block are not reused inside, and traces from inside are not reused outside.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.parity.trace.observer import DropoutCount, UniformSource
from polyamp_jax import compat
from polyamp_jax.observe.jax_only.library_observer import loaded_observers, replace_attribute

_block_numbers: Final = itertools.count(1)


@contextlib.contextmanager
def disable_dropout(draws: UniformSource | None) -> Iterator[DropoutCount]:
    """Return the context manager of `Observer.disable_dropout`, for every supported library."""
    count = DropoutCount()
    with contextlib.ExitStack() as stack:
        stack.enter_context(compat.separate_trace_cache("still" if draws is None else f"draws {next(_block_numbers)}"))
        if draws is None:
            for observer in loaded_observers():
                observer.disable_dropout(stack, count)
        else:
            replace_attribute(stack, jax.random, "bernoulli", functools.partial(_bernoulli, draws))
            replace_attribute(stack, jax.random, "uniform", functools.partial(_uniform, draws))
        yield count


def _bernoulli(draws: UniformSource, key: Any, p: Any = 0.5, shape: Any = None, **_: Any) -> Any:
    """Replace `jax.random.bernoulli`: True where the draw is >= `1 - p`, the dropout rate if True means keep."""
    shape = np.shape(p) if shape is None else tuple(shape)
    return _draw_array(draws, shape, key) >= 1 - p


def _uniform(
    draws: UniformSource, key: Any, shape: Any = (), dtype: Any = float, minval: Any = 0.0, maxval: Any = 1.0, **_: Any
) -> Any:
    """Replace `jax.random.uniform`."""
    drawn = jnp.asarray(_draw_array(draws, tuple(shape), key), jax.dtypes.canonicalize_dtype(dtype))
    return drawn if (minval, maxval) == (0.0, 1.0) else drawn * (maxval - minval) + minval


def _draw_array(draws: UniformSource, shape: tuple[int, ...], key: Any) -> Any:
    """Return the next draws. If `jax.vmap` maps the key, one draw covers all examples, each with its own key."""
    if not compat.is_mapped(key):
        return draws(shape)

    @jax.custom_batching.custom_vmap
    def numbers(key: Any) -> Any:
        return jnp.zeros(shape, jnp.float32)

    @numbers.def_vmap
    def _(size: int, mapped: Any, key: Any) -> Any:
        return jnp.asarray(_draw_array(draws, (size, *shape), key)), True

    return numbers(key)

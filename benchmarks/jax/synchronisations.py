"""Counts the calls of a JAX step in which the host waited for the device. Called by `step`.

Every call gets a batch that another program is still busy making. If that batch is unfinished when the call returns,
the host has not read, nor waited for, anything that depends on it, by whatever way: `float(x)`, `np.asarray(x)` (which
goes past every Python method of an array, so that no counter of method calls would see it) and `block_until_ready` all
look alike. Calls follow each other without a pause, so the state is unfinished too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp

_LOOPS: Final = 10_000
"""About 0.1 s on a CPU; a call that takes longer to start than its batch takes to be made would count as a wait."""
_AHEAD: Final = 8
"""Calls without a pause. JAX's CPU client lets the host run 32 programs ahead, and then makes it wait."""


def waits(step: Callable[[Any, Any], tuple[Any, Any]], state: Any, batch: Any, *, calls: int) -> list[int]:
    """For each call, 1 if the host waited in it, else 0.

    Args:
        step: `state, output = step(state, batch)`.
        state: the state to begin with; the step may consume it.
        batch: a pytree of arrays.
        calls: how many calls.
    """
    state, output = step(state, _late(batch, 1))  # compiles
    jax.block_until_ready((state, output))
    found = []
    for number in range(calls):
        late = _late(batch, _LOOPS)
        state, output = step(state, late)
        found.append(int(jax.tree.leaves(late)[0].is_ready()))
        if number % _AHEAD == _AHEAD - 1:
            jax.block_until_ready((state, output))
    jax.block_until_ready((state, output))
    return found


@jax.jit
def _late(batch: Any, loops: Any) -> Any:
    """The same batch, after a while; the compiler does not know that what is added is 0."""
    start = jnp.full((64, 64), 1 / 64)
    end = jax.lax.fori_loop(0, loops, lambda _, value: jnp.tanh(value @ start), start)
    return jax.tree.map(lambda leaf: leaf + (jnp.abs(end[0, 0]) > 2.0).astype(leaf.dtype), batch)

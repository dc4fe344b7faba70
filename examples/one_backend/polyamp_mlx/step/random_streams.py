"""Random numbers of a step: a seed for every state, and a stream for each of its micro-batches (S12)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Final

import mlx.core as mx
import numpy as np

_LOCK: Final = threading.RLock()


def next_seed(seed: int, draw: int = -1) -> int:
    """Return the seed of a random stream of a state, or of the state's successor (S12)."""
    return int(np.random.SeedSequence((seed, draw + 1)).generate_state(1, np.uint64)[0])


@contextlib.contextmanager
def random_stream(seed: int, draw: int) -> Iterator[None]:
    """Set MLX's global random state to stream `draw` of `seed` for a block, and restore it afterwards."""
    with _LOCK:
        high, low = (int(half) for half in np.array(mx.random.state[0]))
        mx.random.seed(next_seed(seed, draw))
        try:
            yield
        finally:
            mx.random.seed((high << 32) | low)

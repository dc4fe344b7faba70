"""`runs_eagerly`: whether a short training takes less time op by op than its compilation would."""

from __future__ import annotations

import functools
import time
from typing import Any, Final

import tensorflow as tf

from polyamp.recipe.policy import Policy

MOST_UPDATES: Final = 30
"""Updates up to which a training runs op by op: of a network of small layers, XLA's compilation takes as long as 25 to
30 steps, and the larger the layers, the more steps."""
_SLOW_FACTOR: Final = 20.0
"""Duration of a float16 product relative to float32's from which on a processor is slow in float16."""
_SIZE: Final = 256


def runs_eagerly(device: str, policy: Policy, updates: int) -> bool:
    """Return whether a training runs op by op; never in float16 on a processor that only XLA makes fast in it.

    Args:
        device: name of the model's devices, as `Observer.device` gives it.
        policy: of the training.
        updates: number of its updates.
    """
    return updates <= MOST_UPDATES and not (policy.compute == "float16" and "cpu" in device.lower() and _is_slow())


@functools.cache
def _is_slow() -> bool:
    """Return whether the processor's float16 product is much slower than float32's."""
    return _seconds(tf.float16) > _SLOW_FACTOR * _seconds(tf.float32)


def _seconds(dtype: Any) -> float:
    """Return the shortest time of a product of two matrices."""
    with tf.device("CPU"):
        matrix = tf.ones((_SIZE, _SIZE), dtype)
        times = []
        for _ in range(4):
            began = time.perf_counter()
            (matrix @ matrix).numpy()
            times.append(time.perf_counter() - began)
    return min(times)

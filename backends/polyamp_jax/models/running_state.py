"""Running state of a model, and the inputs of one of its calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

RandomKeys = Mapping[str, Any]
"""Stream name -> PRNG key."""


class RunningState(NamedTuple):
    """Values of a model that a forward pass changes.

    Attributes:
        statistics: running statistics and other buffers; dropped when a step is skipped (S12).
        streams: the random-number state stored in the model (nnx). It advances at skipped steps too; otherwise a
            dropout mask that overflows would be drawn again at every step.
        draws: number of passes since the last attempted update, int32 scalar. The keys given to `init` are folded with
            it, so that every micro-batch and every call of `value_and_grad` draws different masks (S12).
        written: the parameters written by passes since the last update, path -> array, or None if there are none.
            Always None in a state, whose parameters already include the writes (S12).
    """

    statistics: Any
    streams: Any
    draws: Any = np.int32(0)
    written: Mapping[str, Any] | None = None


class CollectedState(NamedTuple):
    """Result of a call of an immutable model, in place of `RunningState.statistics`.

    Attributes:
        state: the statistics, which are part of the running state.
        collected: values that the call collected (linen's `sow`), for `loss_fn` to read until the next call.
    """

    state: Any
    collected: Any


class ModelInputs(NamedTuple):
    """Inputs of one call of a model, a pytree.

    Attributes:
        params: the parameters that the model computes with.
        running: the running state before the call.
        keys: keys of the random streams.
        args: positional arguments.
        kwargs: keyword arguments.
        objects: arrays of the nnx objects among the arguments, or None. See `nnx_arguments`.
    """

    params: Any
    running: RunningState
    keys: RandomKeys
    args: Any
    kwargs: Any
    objects: Any = None

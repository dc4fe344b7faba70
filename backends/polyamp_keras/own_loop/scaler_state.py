"""State of a `LossScaleOptimizer`: its variables, one call of its `apply`, and the weights of the micro-batches of an
update (S8).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from polyamp.recipe.scaler import LossScaleState
from polyamp_keras.arrays import native_variable
from polyamp_keras.compat import variable_index


@dataclasses.dataclass
class ScalerState:
    """Variables of a `LossScaleOptimizer`. Those with a default are created by `build`.

    Attributes:
        scale: the loss-scale state.
        skipped: 1 if the last call skipped its update, else 0.
        micro_step: calls since the start of the accumulation.
        not_finite: by variable, the number of non-finite gradient elements at the last skipped update.
        used: by variable, 1 if it had a gradient in this accumulation; None without accumulation.
        rows: rows of the largest micro-batch so far, and the sum of (weight - 1), float32 vector; None without
            accumulation.
        sums: by variable, the accumulated gradients; empty without accumulation.
    """

    scale: LossScaleState
    skipped: Any
    micro_step: Any
    not_finite: Any = None
    used: Any = None
    rows: Any = None
    sums: Sequence[Any] = ()


class MicroBatchShare(NamedTuple):
    """Weight of a micro-batch relative to the largest of its accumulation so far, float32 scalars.

    Attributes:
        weight: its weight; at most 1, so that the product cannot overflow.
        most: rows of the largest micro-batch, including this one.
        earlier: factor for the sums of the previous micro-batches; 1 unless this one is larger than all of them.
    """

    weight: Any
    most: Any
    earlier: Any


class ApplyCall(NamedTuple):
    """One call of `apply`.

    Attributes:
        optimizer: the `LossScaleOptimizer`.
        state: its variables.
        share: share of this call's micro-batch; None if its weight is 1.
        variables: the variables with a gradient in this call; with accumulation, all.
        all_variables: all variables of the call.
        unused: those whose gradient is None.
    """

    optimizer: Any
    state: ScalerState
    share: MicroBatchShare | None
    variables: list[Any]
    all_variables: list[Any]
    unused: list[Any]


def micro_batch_share(state: ScalerState, rows: Any) -> MicroBatchShare:
    """Return the share of a micro-batch by its rows or other weight; before `build`, the share of a first one."""
    one = keras.ops.ones_like(rows)
    if state.rows is None:
        return MicroBatchShare(keras.ops.where(rows > 0.0, one, 0.0), rows, one)
    before = native_variable(state.rows)[0]
    before = keras.ops.where(
        keras.ops.equal(native_variable(state.micro_step), 0) | keras.ops.equal(before, 0.0), rows, before
    )
    most = keras.ops.maximum(before, rows)
    by = keras.ops.where(most > 0.0, most, one)  # all weights are 0 so far
    return MicroBatchShare(rows / by, most, before / by)


def next_rows(call: ApplyCall) -> Any:
    """Return the value of `rows` after a call; None if every micro-batch has weight 1."""
    if call.share is None:
        return None
    weight, most, earlier = call.share
    count = keras.ops.cast(native_variable(call.state.micro_step), "float32")
    return keras.ops.stack(
        [most, native_variable(call.state.rows)[1] * earlier + count * (earlier - 1.0) + weight - 1.0]
    )


def weight_sum(call: ApplyCall) -> Any:
    """Return the sum of the weights of an accumulation, at its last micro-batch; 1 without accumulation."""
    count: Any = float(call.optimizer.accumulate_steps)
    if call.state.sums:
        after = next_rows(call)
        count = count + (native_variable(call.state.rows) if after is None else after)[1]
    return count


def is_last_micro_batch(call: ApplyCall) -> Any:
    """Return whether a call completes the accumulation, boolean scalar."""
    return keras.ops.equal(native_variable(call.state.micro_step), call.optimizer.accumulate_steps - 1)


def variable_indices(call: ApplyCall, variables: Sequence[Any]) -> list[int]:
    """Return the index of each variable among those of `build`."""
    return [variable_index(call.optimizer, variable) for variable in variables]

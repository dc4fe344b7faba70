"""Weight of a micro-batch or replica in the mean of a loss (S8, S9)."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from polyamp.rules.loss_weights import TermTotals, WeightFunction
from polyamp_keras.arrays import leaves_with_paths, native_variable


class LossWeighting(NamedTuple):
    """Weighting of a batch (S8, S9).

    Attributes:
        function: the user's `weight=`, or None.
        share: for a micro-batch weighted by its rows: their ratio to those of the largest.
        rows: rows of the batch; None if it is the only one.
        totals: divisors of the terms of a sum of means, or None.
    """

    function: WeightFunction | None
    share: float = 1.0
    rows: Any = None
    totals: TermTotals | None = None


def to_weight(value: Any) -> Any:
    """Return a number or scalar as float32 without gradient."""
    return tf.stop_gradient(tf.cast(native_variable(value), tf.float32))


def batch_rows(batch: Any) -> Any:
    """Return the rows of a batch, as a number or scalar tensor; 1 if its arrays differ in length."""
    arrays = [leaf for _, leaf in leaves_with_paths(batch) if tf.is_tensor(leaf) and leaf.shape.rank]
    lengths = {leaf.shape[0] for leaf in arrays}
    if len(lengths) != 1:
        return 1
    known = lengths.pop()
    return tf.cast(tf.shape(arrays[0])[0], tf.float32) if known is None else known

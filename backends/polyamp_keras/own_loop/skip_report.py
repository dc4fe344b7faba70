"""Parameters whose gradients were not finite at the last skipped update, for the error about a stuck scale."""

from __future__ import annotations

from typing import Any

import keras

from polyamp_keras.arrays import read_value, variable_name
from polyamp_keras.compat import own_trainable_variables


def non_finite_names(optimizer: Any, counts: Any) -> list[str]:
    """Return the paths of the variables with non-finite gradients, by `ScalerState.not_finite`."""
    pairs = zip(own_trainable_variables(optimizer), keras.ops.convert_to_numpy(read_value(counts)), strict=True)
    return [variable_name(variable) for variable, count in pairs if count]

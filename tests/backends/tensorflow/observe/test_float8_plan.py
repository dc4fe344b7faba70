"""`polyamp.float8_plan` of a Keras model on TensorFlow, which has no programs for it yet."""

from __future__ import annotations

import keras
import pytest

import polyamp


def test_it_is_refused_by_name() -> None:
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(16)])
    with pytest.raises(
        polyamp.UnsupportedError, match=r"^float8_plan: the tensorflow backend of this version measures"
    ):
        polyamp.float8_plan(model, "mixed_float8", keras.ops.ones((2, 16)))

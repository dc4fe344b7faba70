"""Activations of JAX under their canonical names."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from polyamp_jax.porting.layers.activations import ACTIVATION_NAMES, activation_attributes


@pytest.mark.parametrize("function", ACTIVATION_NAMES)
def test_a_function_has_the_name_of_its_values(function: Any) -> None:
    known = activation_attributes(function)
    assert {**known, **activation_attributes(lambda x: function(x))} == known


def test_a_name_is_that_of_torch_and_keras() -> None:
    assert activation_attributes(jax.nn.hard_swish) == {"activation": "hard_silu"}

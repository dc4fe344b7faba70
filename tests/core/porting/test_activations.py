"""Activations are identified by their values, and computed by their names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polyamp.porting.layouts.activations import _FORMULAS, apply_activation, identify_activation


@pytest.mark.parametrize("name", _FORMULAS)
def test_a_formula_has_its_own_name(name: str) -> None:
    assert identify_activation(lambda x: _FORMULAS[name](x).astype(np.float32)) == {"activation": name}


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda x: np.where(x > 0, x, 0.01 * x), {"activation": "leaky_relu", "negative_slope": 0.01}),
        (lambda x: np.where(x > 0, x, 0.5 * np.expm1(x)), {"activation": "elu", "alpha": 0.5}),
        (lambda x: np.exp(x - x.max()) / np.exp(x - x.max()).sum(), {"activation": "softmax"}),
        (np.sin, {}),
        (lambda x, y: x, {}),
        (lambda x: x.sum(), {}),
    ],
)
def test_constants_are_read_off_and_other_functions_have_no_name(function: Any, found: dict[str, Any]) -> None:
    assert identify_activation(function) == found


def test_an_activation_with_a_constant_is_not_applied() -> None:
    assert apply_activation("leaky_relu", np.ones(2)) is None
    assert apply_activation("softmax", np.ones(2)) is None
    applied = apply_activation("relu6", np.array([-1.0, 3.0, 9.0]))
    assert applied is not None
    assert applied.tolist() == [0.0, 3.0, 6.0]

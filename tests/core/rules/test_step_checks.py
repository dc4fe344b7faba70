"""S11's factor, and S20: what is refused in the same words by every backend."""

from __future__ import annotations

import pytest

from polyamp.array_namespace import PYTHON
from polyamp.errors import GradientError
from polyamp.rules import clip, step_checks


def test_s11_clip_factor_is_exact_for_small_and_zero_norms() -> None:
    assert clip.clip_factor(2e-6, 1e-6, PYTHON) == 0.5
    assert clip.clip_factor(0.0, 1.0, PYTHON) == 1.0


def test_s20_surplus_gradients_are_refused() -> None:
    with pytest.raises(GradientError, match=r"not a parameter: \['b'\]"):
        step_checks.check_gradients([("a", (2,))], [("a", (2,)), ("b", (2,))])


def test_s23_a_gradient_of_none_is_an_unused_parameter_unless_there_is_nothing_else() -> None:
    parameters = [("a", (2,)), ("b", (3,))]
    step_checks.check_gradients(parameters, [("a", None), ("b", (3,))])
    with pytest.raises(GradientError, match="depends on none of the model's trainable parameters"):
        step_checks.check_gradients(parameters, [("a", None), ("b", None)])

"""S11's factor, and S20: what is refused in the same words by every backend."""

from __future__ import annotations

import pytest

from polyamp.array_namespace import PYTHON
from polyamp.errors import GradientError
from polyamp.recipe.clip_limits import ClipLimits
from polyamp.rules import clip, step_checks


def test_s11_clip_factor_is_exact_for_small_and_zero_norms() -> None:
    assert clip.clip_factor(2e-6, 1e-6, PYTHON) == 0.5
    assert clip.clip_factor(0.0, 1.0, PYTHON) == 1.0


def test_s11_norms_are_asked_for_once_and_only_where_sets_clip_by_them() -> None:
    """One all-reduce has them all. A single set has the norm that the finite flag had."""
    asked: list[list[list[int]]] = []

    def norms_of(places: list[list[int]]) -> list[float]:
        asked.append(places)
        return [4.0] * len(places)

    by_norm, by_value, none = ClipLimits(norm=1.0), ClipLimits(value=1.0), ClipLimits()
    sets = clip.clip_sets([(0, by_norm), (1, by_norm), (0, by_norm), (2, by_value), (3, none), (1, by_norm)])
    plans = clip.plan_clips(sets, [True, True, True, True, True, False], 8.0, norms_of, PYTHON)
    assert asked == [[[0, 2], [1]]]
    assert [(each.places, each.factor) for each in plans] == [([0, 2], 0.25), ([1], 0.25), ([3], None), ([4], None)]
    assert [each.transformation is None for each in plans] == [True, True, False, True]
    assert [each.factor for each in clip.plan_clips(clip.clip_sets([(0, by_norm)]), [True], 8.0, norms_of, PYTHON)] == [
        0.125
    ]
    assert clip.plan_clips(sets, [False] * 6, None, norms_of, PYTHON) == []
    clip.plan_clips(clip.clip_sets([(None, by_value)] * 2), [True, True], None, norms_of, PYTHON)
    assert len(asked) == 1


def test_s20_surplus_gradients_are_refused() -> None:
    with pytest.raises(GradientError, match=r"not a parameter: \['b'\]"):
        step_checks.check_gradients([("a", (2,))], [("a", (2,)), ("b", (2,))])


def test_s23_a_gradient_of_none_is_an_unused_parameter_unless_there_is_nothing_else() -> None:
    parameters = [("a", (2,)), ("b", (3,))]
    step_checks.check_gradients(parameters, [("a", None), ("b", (3,))])
    with pytest.raises(GradientError, match="depends on none of the model's trainable parameters"):
        step_checks.check_gradients(parameters, [("a", None), ("b", None)])

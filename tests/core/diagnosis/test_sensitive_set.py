"""The search for the smallest set of modules: exact, and within its number of trials, for every order."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyamp.diagnosis.report_data import overrides_of
from polyamp.diagnosis.sensitive_set import find_sensitive
from polyamp.recipe.overrides import dtype_at


@settings(max_examples=200, deadline=None)
@given(st.integers(20, 200), st.data())
def test_the_set_is_exact_and_the_trials_are_at_most_2_k_log_n(count: int, data: st.DataObject) -> None:
    modules = [f"m{number}" for number in range(count)]
    sensitive = frozenset(data.draw(st.lists(st.sampled_from(modules), min_size=1, max_size=4, unique=True)))
    trials: list[frozenset[str]] = []

    def agrees(chosen: frozenset[str]) -> bool:
        trials.append(chosen)
        return sensitive <= chosen

    assert frozenset(find_sensitive(modules, agrees)) == sensitive
    assert len(trials) <= 2 * len(sensitive) * math.log2(count)


def test_a_good_order_takes_few_trials() -> None:
    trials: list[frozenset[str]] = []

    def agrees(chosen: frozenset[str]) -> bool:
        trials.append(chosen)
        return {"m0", "m1"} <= chosen

    assert sorted(find_sensitive([f"m{number}" for number in range(200)], agrees)) == ["m0", "m1"]
    assert len(trials) <= 7


@pytest.mark.parametrize("sensitive", [["a/norm"], ["a"], ["a", "b/c"]])
def test_overrides_keep_the_sensitive_modules_and_no_others_in_float32(sensitive: list[str]) -> None:
    modules = ["a", "a/norm", "a/act", "b", "b/c", "b/c/d"]
    overrides = overrides_of(sensitive, modules, "float16")
    found = [module for module in modules if dtype_at(overrides, module) == "float32"]
    assert found == sensitive

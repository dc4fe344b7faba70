"""S28: which parameters stayed, from objects, shapes and values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.errors import ModelError, StateError
from polyamp.reference import MLP
from polyamp.rules.refresh import KnownParameter, RefreshPlan, parse_globs

OLD = {"body": KnownParameter(1, (2,)), "head": KnownParameter(2, (3,))}


def never(old: str, new: str) -> bool:
    return False


@pytest.mark.parametrize(
    ("now", "same", "found"),
    [
        ({"body": KnownParameter(1, (2,)), "head": KnownParameter(2, (3,))}, None, {"body": "body", "head": "head"}),
        ({"a/body": KnownParameter(1, (2,)), "head": KnownParameter(9, (3,))}, None, {"a/body": "body"}),
        ({"body": KnownParameter(2, (3,)), "head": KnownParameter(1, (2,))}, None, {"body": "head", "head": "body"}),
        ({"body": KnownParameter(1, (4,))}, None, {}),
        ({"body": KnownParameter(8, (2,)), "head": KnownParameter(9, (4,))}, lambda *_: True, {"body": "body"}),
        ({"new": KnownParameter(8, (2,))}, never, {}),
    ],
    ids=["all", "moved and replaced", "swapped", "another shape", "another object of equal value", "a new path"],
)
def test_s28_what_stayed(now: dict[str, KnownParameter], same: Any, found: dict[str, str]) -> None:
    assert RefreshPlan().surviving_parameters(OLD, now, same) == found


def test_s28_fresh_and_keep() -> None:
    now = {"body": KnownParameter(1, (2,)), "head": KnownParameter(9, (3,))}
    assert RefreshPlan(fresh=("body",)).surviving_parameters(OLD, now) == {}
    assert RefreshPlan(keep=("**",)).surviving_parameters(OLD, now) == {"body": "body", "head": "head"}
    assert RefreshPlan(keep=("head",)).surviving_parameters(OLD, now, never) == {"body": "body", "head": "head"}
    assert RefreshPlan(fresh=("head",)).surviving_parameters(OLD, now, never) == {"body": "body"}
    with pytest.raises(ModelError, match=r"other values at 'head'.*fresh=\['head'\].*keep=\['head'\]"):
        RefreshPlan().surviving_parameters(OLD, now, never)


def test_s28_arguments_are_globs() -> None:
    assert parse_globs("fresh", "head/**") == ("head/**",)
    assert parse_globs("keep", ["a", "b"]) == ("a", "b")
    for wrong in (3, None, [""], [1]):
        with pytest.raises(ModelError, match=r"fresh must be a glob of parameter paths, or a list.*Received: fresh="):
            parse_globs("fresh", wrong)


def test_s28_a_reference_model_is_a_value() -> None:
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adam(0.1))
    first = MLP.random([4, 8, 2], seed=0)
    state = polyamp.init(first, recipe)

    def loss_fn(model: Any, x: Any) -> Any:
        return polyamp.losses.mean_squared_error(model(x), np.zeros((3, 2), np.float32))

    state, _ = polyamp.train_step(loss_fn, recipe)(state, np.ones((3, 4), np.float32))
    with pytest.raises(ModelError, match=r"refresh\(state, model\) needs the changed model: a reference state holds"):
        polyamp.refresh(state)
    with pytest.raises(ModelError, match=r"other values at 'dense0/kernel' than the state has trained"):
        polyamp.refresh(state, first)
    with pytest.raises(
        StateError, match=r"refresh takes a state that polyamp\.init or a step returned\. Received: MLP"
    ):
        polyamp.refresh(first)

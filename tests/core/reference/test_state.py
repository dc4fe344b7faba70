"""A state of the reference backend is a value: a step returns another one, and nobody changes it."""

from __future__ import annotations

from typing import Any

import pytest

import polyamp
from polyamp.reference.models import MLP


def test_a_state_cannot_be_changed() -> None:
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
    state: Any = polyamp.init(MLP.random([2, 3, 1], seed=0), recipe)
    with pytest.raises(AttributeError, match="immutable"):
        state.step = 1

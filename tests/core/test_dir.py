"""`dir` and completion of what users hold: the names that they need, and no internals."""

from __future__ import annotations

import types
from typing import Any

import pytest

import polyamp
from polyamp import losses, parity, porting, schedules
from polyamp.reference import MLP


def shown(value: Any) -> list[str]:
    """The names without the special ones."""
    return sorted(name for name in dir(value) if not name.startswith("__"))


@pytest.mark.parametrize("module", [losses, parity, porting, schedules], ids=lambda module: str(module.__name__))
def test_a_modules_names_are_its_public_ones(module: types.ModuleType) -> None:
    assert sorted(dir(module)) == sorted(module.__all__)
    assert sorted(dir(polyamp)) == sorted(polyamp.__all__)


def test_a_states_names_are_those_of_the_contract() -> None:
    state = polyamp.init(MLP.random([2, 1], seed=0), polyamp.Recipe(optimizer=polyamp.sgd(0.1)))
    assert shown(state) == ["backend", "groups", "model", "recipe", "scale_state", "step"]
    assert "watch" in polyamp.State.__dict__  # for a backend, not for a user
    assert state.watch is not None


def test_records_show_their_fields_and_methods() -> None:
    assert shown(polyamp.adamw(0.1)) == sorted([*polyamp.adamw.field_names, "replace", "to_dict"])
    for record in (polyamp.Recipe(optimizer=polyamp.sgd(0.1)), polyamp.Policy(), polyamp.LossScaler(), polyamp.Ema()):
        names = shown(record)
        assert {*record.field_names, "replace", "to_dict"} <= {*names}
        assert {"called", "defaults", "error", "field_names", "keyword_only", "tag", "word"}.isdisjoint(names)
        assert [name for name in names if name.startswith("_")] == []

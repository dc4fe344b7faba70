"""S20: a backend of a third party that was written before there were parameter groups refuses them, at `init`."""

from __future__ import annotations

import types
from typing import Any

import pytest

import polyamp
from polyamp import UnsupportedError
from polyamp.contract import registry


def test_s20_groups_are_refused_where_the_states_know_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        name = "old"

        def init(self, model: Any, recipe: Any, **options: Any) -> Any:
            return types.SimpleNamespace(backend=self, recipe=recipe)

    monkeypatch.setattr(registry, "backend_for", lambda model: Old())
    polyamp.init(object(), polyamp.Recipe(optimizer=polyamp.sgd(0.1)))
    grouped = polyamp.Recipe(optimizer=polyamp.sgd(0.1, groups=[polyamp.Group("**", learning_rate=0.2)]))
    with pytest.raises(UnsupportedError, match=r"the old backend .*one set of hyperparameters.*Received: 1 groups"):
        polyamp.init(object(), grouped)

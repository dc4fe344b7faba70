"""`Ema`: what it accepts, its messages, files, and the share of each move."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.array_namespace import PYTHON
from polyamp.contract import registry
from polyamp.errors import ArgumentError, RecipeError
from polyamp.reference import MLP
from polyamp.reference.arrays import XP
from polyamp.reference.backend import ReferenceBackend
from polyamp.rules.averages import average_share, averaged_paths, move_average
from polyamp.train.recipe_changes import list_changes, recipe_settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 1.0}, r"decay must be a number of at least 0 and below 1, such as 0\.999\. Received: decay=1\.0"),
        ({"decay": True}, r"Received: decay=True"),
        ({"decay": np.float32(0.5)}, r"Received: decay="),
        ({"warmup": 10}, r"warmup must be True or False\. Received: warmup=10"),
        ({"every": 0}, r"every must be an integer of at least 1\. Received: every=0"),
        ({"every": 2.0}, r"Received: every=2\.0"),
        (
            {"statistics": "averages"},
            r"'current' or 'average'\. Received: statistics='averages'\. Did you mean 'average'",
        ),
        ({"exclude": "head.bias"}, r"each glob of exclude.*Received: 'head\.bias'\. Did you mean 'head/bias'\?"),
        ({"exclude": 3}, r"exclude must be a glob or several\. Received: exclude=3"),
    ],
)
def test_what_it_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        polyamp.Ema(**options)


def test_a_recipe_takes_an_ema_and_says_so() -> None:
    with pytest.raises(RecipeError, match=r"Received: ema=0\.999\. Write ema=polyamp\.Ema\(decay=0\.999\)"):
        polyamp.Recipe(ema=0.999)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(RecipeError, match=r"Call it: polyamp\.Ema\(\)"):
        polyamp.Recipe(ema=polyamp.Ema)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(ArgumentError, match=r"Recipe\(ema=polyamp\.Ema\(decay=\.\.\.\)\)"):
        polyamp.Recipe(use_ema=True)  # type: ignore[call-arg]  # the mistake
    with pytest.raises(ArgumentError, match=r"Recipe\(ema=polyamp\.Ema\(decay=\.\.\.\)\)"):
        polyamp.adamw(1e-3, ema_momentum=0.9)  # type: ignore[call-arg]  # the mistake


@pytest.mark.parametrize("ema", [polyamp.Ema(), polyamp.Ema(0.5, True, 3, "average", ["head/**", "*/bias"])])
def test_files_and_changes(ema: polyamp.Ema) -> None:
    recipe = polyamp.Recipe(ema=ema)
    assert polyamp.Recipe.from_toml(recipe.to_toml()) == recipe
    assert polyamp.Recipe.from_json(recipe.to_json()) == recipe
    assert hash(recipe) == hash(polyamp.Recipe(ema=ema.replace()))
    (change, *_) = list_changes(recipe_settings(recipe), recipe_settings(recipe.replace(ema=ema.replace(decay=0.25))))
    assert str(change) == f"ema.decay: {ema.decay} -> 0.25"
    assert next(str(c) for c in list_changes(recipe_settings(polyamp.Recipe()), recipe_settings(recipe))).startswith(
        "ema: (not there) -> {decay: "
    )
    with pytest.raises(RecipeError, match=r"Received: 'momentum'"):
        polyamp.Recipe.from_toml('policy = "float32"\n[ema]\nmomentum = 0.9\n')


def test_s34_shares_are_those_of_the_formula_in_python_and_in_arrays() -> None:
    ema = polyamp.Ema(0.9, warmup=True, every=3)
    expected = {3: 1.0, 6: 9 / 12, 9: 9 / 13, 300: 0.1}
    for count in (0, 1, 2, 3, 4, 6, 8, 9, 300, 301):
        wanted = expected.get(count, 0.0)
        assert average_share(ema, float(count), None, PYTHON) == pytest.approx(wanted, rel=1e-12)
        assert average_share(ema, float(count), False, PYTHON) == 0.0
        share = average_share(ema, np.float32(count), np.bool_(True), XP)
        assert (share.dtype, float(share)) == (np.float32, pytest.approx(wanted, rel=1e-6))
    tiny, value = np.array([-0.0, 1e-45], np.float32), np.array([3.0, np.nan], np.float32)
    assert move_average(tiny, value, np.float32(0.0), XP).tobytes() == tiny.tobytes()
    assert move_average(tiny, value, np.float32(1.0), XP).tobytes() == value.tobytes()


def test_s34_excluded_paths_and_their_aliases() -> None:
    aliases = {"trunk": {"jax": "body"}, "pools/*": {"jax": "pool_*"}}  # modules without parameters
    recipe = polyamp.Recipe(ema=polyamp.Ema(exclude=["trunk", "head/bias"]), aliases=aliases)
    paths = ["body/w", "head/w", "head/bias"]
    assert averaged_paths(recipe, paths, backend="jax") == ["head/w"]
    assert averaged_paths(polyamp.Recipe(), paths, backend="jax") == []
    with pytest.raises(RecipeError, match=r"ema: exclude: the glob 'haed' matches no trainable parameter\. Nearest:"):
        averaged_paths(polyamp.Recipe(ema=polyamp.Ema(exclude="haed")), paths, backend="jax")


def test_s34_a_backend_without_averages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    older = {name: value for name, value in vars(ReferenceBackend).items() if name not in ("averaged", "__dict__")}
    monkeypatch.setattr(registry, "backend_for", lambda model: type("Older", (), older)())
    with pytest.raises(polyamp.UnsupportedError, match=r"the reference backend keeps no averages\. .*Use ema=None"):
        polyamp.init(MLP.random([4, 1], seed=0), polyamp.Recipe(ema=polyamp.Ema()))

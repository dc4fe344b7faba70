"""docs/guides/recipes.md: each block makes a recipe that a file holds, and the table names optimizers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import polyamp
from polyamp.recipe.optimizers import SPECS

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "recipes.md").read_text(encoding="utf-8")


def test_each_block_is_a_recipe_that_a_file_holds() -> None:
    names: dict[str, Any] = {}
    found = []
    for block in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL):
        exec(block, names)
        recipe = names.pop("recipe")
        assert polyamp.Recipe.from_json(recipe.to_json()) == recipe
        found.append(recipe.optimizer.tag)
    assert found == ["muon", "adamw", "sgd", "lamb", "adafactor", "schedule_free"]


def test_the_table_names_optimizers() -> None:
    rows = re.findall(r"^\| `(\w+)", GUIDE, re.MULTILINE)
    assert len(rows) == 6
    assert set(rows) <= {spec.tag for spec in SPECS}

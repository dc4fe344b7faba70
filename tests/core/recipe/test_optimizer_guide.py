"""The guide that adds an optimizer shows the class as it stands, and lists every optimizer, as `optimizers.py` does."""

from __future__ import annotations

import inspect
import pkgutil
import re
from importlib import import_module
from pathlib import Path

import pytest

from polyamp.recipe import optimizer_formulas
from polyamp.recipe.optimizer_spec import Spec
from polyamp.recipe.optimizers import SPECS, nadam

PAGE = (Path(__file__).parents[3] / "docs/guides/add_an_optimizer.md").read_text(encoding="utf-8")


def test_the_guide_shows_the_class() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert code == inspect.getsource(nadam)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.tag)
def test_the_guide_lists_every_optimizer(spec: type[Spec]) -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    assert any(f"`{spec.tag}`" in row.split("|")[1] for row in rows)


def test_the_guide_names_every_part() -> None:
    table = PAGE.partition("## What the class has")[2].partition("##")[0]
    cells = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", table, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"\w+", cell)}
    own = {name for spec in SPECS for name in vars(spec) if not name.startswith("_")} & set(vars(Spec))
    assert named == own - {"defaults", "field_names", "keyword_only"} | {"tag"}


def test_every_optimizer_of_the_folder_is_listed() -> None:
    """`optimizers.py` names each, for type checkers; one that is forgotten there would exist for nobody."""
    names = [each.name for each in pkgutil.iter_modules(optimizer_formulas.__path__)]
    modules = [import_module(f"{optimizer_formulas.__name__}.{name}") for name in names]
    found = {each for module in modules for each in vars(module).values() if isinstance(each, type)}
    assert {each for each in found if issubclass(each, Spec) and each.tag} == set(SPECS)

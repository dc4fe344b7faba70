"""docs/guides/schedules.md and `schedules.plot`: the blocks print what stands below them, every schedule is listed."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

import polyamp
from polyamp import schedules
from polyamp.errors import ArgumentError
from polyamp.schedules.library_schedules import LIBRARY_SCHEDULES
from polyamp.schedules.picture import rate_lines

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "schedules.md").read_text(encoding="utf-8")


def test_the_blocks_print_what_stands_below_them(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {}
    for code, printed in re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", GUIDE, re.DOTALL):
        exec(code, scope)
        assert capsys.readouterr().out == printed


def test_the_table_has_every_schedule_with_its_defaults() -> None:
    calls = re.findall(r"^\| `(\w+)\((.*?)\)` \|", GUIDE, re.MULTILINE)
    assert {name for name, _ in calls} == {kind.tag for kind in get_args(schedules.Schedule)}
    for name, arguments in calls:
        kind = getattr(schedules, name)
        for argument in arguments.split(", "):
            field, _, default = argument.partition("=")
            assert field in kind.field_names, (name, field)
            assert not default or repr(kind.defaults[field]) == default.replace('"', "'"), (name, argument)


def test_the_libraries_named_are_those_that_like_knows() -> None:
    for library in ("torch", "optax", "Keras", "transformers"):
        assert library in GUIDE
        assert any(name.startswith(f"{library.lower()}.") for name in LIBRARY_SCHEDULES)


def test_a_picture_has_a_line_for_each_group_with_a_rate_of_its_own(tmp_path: Path) -> None:
    groups = (
        polyamp.Group("encoder/**", learning_rate_scale=0.1, trainable_after=3),
        polyamp.Group(kind=("bias", "norm"), learning_rate=0.5),
        polyamp.Group("head/**", weight_decay=0.0),
    )
    recipe = polyamp.Recipe(optimizer=polyamp.adamw(schedules.cosine(1.0, 10), groups=groups))
    assert {label: line(5) for label, line in rate_lines(recipe).items()} == {
        "learning rate": 0.5,
        "encoder/**, trained after 3 updates": 0.05,
        "bias, norm": 0.5,
    }
    figure = schedules.plot(recipe, 10, tmp_path / "rates.png")
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.lines] == [
        "learning rate",
        "encoder/**, trained after 3 updates",
        "bias, norm",
    ]
    assert list(axes.lines[0].get_ydata()) == [schedules.cosine(1.0, 10)(count) for count in range(11)]
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")


def test_s20_what_has_no_rate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match=r"rates must be a recipe, an optimizer spec, a schedule, .*Received: 'cos"):
        schedules.plot("cosine", 10)
    with pytest.raises(polyamp.RecipeError, match=r"steps must be an integer of at least 1\. Received: steps=0"):
        schedules.plot(schedules.cosine(1.0, 10), 0)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ArgumentError, match=r'plot needs matplotlib\. Run: pip install "polyamp\[parity\]"'):
        schedules.plot(0.1, 10)

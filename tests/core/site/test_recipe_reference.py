"""docs/reference/optimizers.md and schedules.md: each formula is the code's, each optimizer and schedule has one, and
the tables name every argument and native class.
"""

from __future__ import annotations

import importlib
import math
import re
import runpy
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import polyamp
from polyamp import schedules
from polyamp.array_namespace import PYTHON
from polyamp.recipe.optimizer_spec import Spec
from polyamp.recipe.optimizers import SPECS
from polyamp.reference.arrays import XP
from polyamp.schedules.combinations import ScaledSchedule

ROOT = Path(__file__).parents[3]
REFERENCE = ROOT / "docs" / "reference"
OPTIMIZERS = (REFERENCE / "optimizers.md").read_text(encoding="utf-8")
SCHEDULES = (REFERENCE / "schedules.md").read_text(encoding="utf-8")
STEPS = 4
RATE = 0.03
VARIANTS: list[Spec] = [
    *(spec(RATE) for spec in SPECS if spec.tag != "muon"),
    polyamp.muon(RATE, ns_dtype="float64"),
    polyamp.sgd(RATE, momentum=0.9, weight_decay=0.1),
    polyamp.sgd(RATE, momentum=0.9, nesterov=True),
    polyamp.adam(RATE, weight_decay=0.1),
    polyamp.adam(RATE, amsgrad=True),
    polyamp.adamw(RATE, amsgrad=True),
    polyamp.nadam(RATE, weight_decay=0.1),
    polyamp.nadam(RATE, weight_decay=0.1, decoupled_weight_decay=True),
    polyamp.rmsprop(RATE, weight_decay=0.1, momentum=0.9),
    polyamp.rmsprop(RATE, centered=True),
    polyamp.adagrad(RATE, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.2),
    polyamp.lion(RATE, weight_decay=0.1),
    polyamp.adafactor(0.9, weight_decay=0.1, d=1.5),
    polyamp.muon(RATE, ns_dtype="float64", nesterov=False, scale="moonlight"),
    polyamp.schedule_free(RATE, weight_decay=0.1),
]
SAMPLES: list[Any] = [
    schedules.constant(0.5),
    schedules.linear_warmup(1.0, 4, start=0.2, origin=-1),
    schedules.linear(1.0, 3, 9, end=0.2),
    schedules.cosine(1.0, 8, end=0.1),
    schedules.cosine(1.0, 8, origin=-3),
    schedules.warmup_cosine(1.0, 3, 9, end=0.1, origin=-1),
    schedules.warmup_cosine(1.0, 0, 9),
    *(schedules.wsd(1.0, 2, 10, 5, end=0.1, shape=shape) for shape in ("1-sqrt", "linear", "cosine")),
    schedules.one_cycle(1.0, 2.5, 9),
    schedules.one_cycle(1.0, 3, 9, start=0.2, end=0.0, shape="linear"),
    schedules.inverse_sqrt(1.0, 3),
    schedules.inverse_sqrt(1.0, 3, timescale=5.0),
    schedules.polynomial(1.0, 8, power=2.0, end=0.1),
    schedules.exponential(1.0, 0.5, every=4),
    schedules.step(1.0, 3, 0.5),
    schedules.restarts(1.0, 3, end=0.1, peak_factor=0.8),
    schedules.restarts(1.0, 3, factor=2, peak_factor=0.8),
    schedules.piecewise((1.0, 0.5, 0.1), (2, 5)),
    schedules.join([schedules.linear_warmup(1.0, 3), schedules.exponential(1.0, 0.5)], [4]),
]
SAME_NAME = {"momentum": "buffer"}
"""Slot that has the name of an argument -> its name in the formulas."""


def formulas(page: str) -> dict[str, str]:
    """Heading -> the block below it."""
    return dict(re.findall(r"^## `(\w+)`\n(?:(?!^## ).)*?```python\n(.*?)```", page, re.MULTILINE | re.DOTALL))


def arguments(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.field_names}


def formula_update(
    optimizer: Spec, param: np.ndarray[Any, Any], grad: np.ndarray[Any, Any], slots: dict[str, Any], n: int
) -> dict[str, Any]:
    """What the page's formula makes of a parameter and its slots. Rows are outputs, as in torch."""

    def rows(x: Any) -> Any:
        return np.mean(x, 1, keepdims=True)

    def columns(x: Any) -> Any:
        return np.mean(x, 0, keepdims=True)

    scope: dict[str, Any] = {name: getattr(np, name) for name in ("sqrt", "sign", "maximum", "minimum")}
    scope |= {"norm": np.linalg.norm, "rms": lambda x: np.sqrt(np.mean(x**2)), "rows": rows, "columns": columns}
    scope |= {"outputs": param.shape[0], "inputs": param.shape[1]}
    scope |= dict.fromkeys(("square_avg", "grad_avg", "buffer", "max_exp_avg_sq"), 0.0)  # where there is no such slot
    scope |= arguments(optimizer)
    scope |= {SAME_NAME.get(name, name): value for name, value in slots.items()}
    scope |= {"param": param, "grad": grad, "n": n}
    scope["beta1"], scope["beta2"] = scope.get("betas", (None, None))
    exec(formulas(OPTIMIZERS)[optimizer.tag], scope)
    return scope


@pytest.mark.parametrize("optimizer", VARIANTS, ids=repr)
def test_the_formula_of_an_optimizer_is_that_of_the_code(optimizer: Spec) -> None:
    random = np.random.default_rng(0)
    param, shape = random.normal(size=(3, 4)), (3, 4)
    slots = {s: np.full(optimizer.slot_shape(s, shape), optimizer.initial(s)) for s in optimizer.slots}
    theirs, theirs_slots = param, dict(slots)
    for n in range(1, STEPS + 1):
        grad = random.normal(size=shape)
        found = formula_update(optimizer, theirs, grad, theirs_slots, n)
        theirs = found["param"]
        theirs_slots = {name: found.get(SAME_NAME.get(name, name)) for name in theirs_slots}
        param, slots = optimizer.update(XP, param, grad, slots, np.float64(optimizer.learning_rate), np.float64(n))
        assert theirs == pytest.approx(param, rel=1e-6, abs=1e-9), n


def test_every_optimizer_has_a_formula_and_every_variant_is_tried() -> None:
    tags = [spec.tag for spec in SPECS]
    assert sorted(formulas(OPTIMIZERS)) == sorted(tags)
    flags = {(v.tag, name) for v in VARIANTS for name, default in v.defaults.items() if getattr(v, name) is not default}
    expected = {(s.tag, name) for s in SPECS for name, value in s.defaults.items() if value is False}
    assert expected <= flags


@pytest.mark.parametrize("schedule", SAMPLES, ids=repr)
def test_the_formula_of_a_schedule_is_that_of_the_code(schedule: Any) -> None:
    helpers = SCHEDULES.partition("```python\n")[2].partition("```")[0]
    for count in range(12):
        scope = {"cos": math.cos, "sqrt": math.sqrt, "floor": math.floor, "pi": math.pi, "count": count}
        scope |= arguments(schedule)
        exec(helpers + formulas(SCHEDULES)[schedule.tag], scope)
        assert scope["rate"] == pytest.approx(schedule(count, PYTHON), rel=1e-9, abs=1e-12), count


def test_every_schedule_has_a_formula_and_a_line_in_the_picture() -> None:
    kinds = {kind.tag for kind in get_args(schedules.Schedule)} - {ScaledSchedule.tag}
    assert set(formulas(SCHEDULES)) == kinds == {schedule.tag for schedule in SAMPLES}
    charts = runpy.run_path(str(ROOT / "docs" / "images" / "draw_schedules.py"))["CHARTS"]
    drawn = [schedule for chart in charts.values() for schedule in chart.values()]
    parts = [part for schedule in drawn if schedule.tag == "join" for part in schedule.schedules]
    assert {schedule.tag for schedule in [*drawn, *parts]} == kinds


def test_every_table_has_its_place_and_names_what_the_code_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    tool = importlib.import_module("recipe_tables")
    pages = [tmp_path / "optimizers.md", tmp_path / "schedules.md"]
    for page, text in zip(pages, (OPTIMIZERS, SCHEDULES), strict=True):
        page.write_text(text, encoding="utf-8")
    tool.fill_tables(pages)
    optimizers, found = (page.read_text(encoding="utf-8") for page in pages)
    assert "<!--" not in optimizers + found
    assert "| `betas` | `(0.9, 0.999)` |" in optimizers.partition("## `adamw`")[2].partition("## ")[0]
    assert "| `keras.optimizers.Adam` | `momentums` = `exp_avg`, `velocities` = `exp_avg_sq` | `epsilon` = `eps` |" in (
        optimizers
    )
    assert "| [`adamw`](#adamw) | `AdamW` |  |  | from the parameter | each element alone |" in optimizers
    for spec in SPECS:
        for natives in spec.native.values():
            assert all(f"`{native.name}`" in optimizers and native.note in optimizers for native in natives)
    assert "| `shape` | `'1-sqrt'` |" in found
    assert "| `torch.StepLR` | `lr`, `step_size`, `gamma` |" in found
    with pytest.raises(LookupError, match=r"tables without a place: .*'optimizer: adam', .*'schedules of libraries'"):
        tool.fill_tables(pages)  # the places are filled
    pages[0].write_text("<!-- optimizer: x -->\n", encoding="utf-8")
    with pytest.raises(LookupError, match=r"optimizers.md has places for tables that are not left: \['optimizer: x'\]"):
        tool.fill_tables(pages)

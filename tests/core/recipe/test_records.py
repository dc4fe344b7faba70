"""What policies, scalers, recipes, specs and schedules have in common: `replace`, `repr`, copies, equality."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp import LossScaleError, LossScaler, Policy, PolicyError, PolyampError, Recipe, RecipeError, schedules
from polyamp.recipe.optimizers import SPECS
from polyamp.recipe.scaler import PRESETS

SCHEDULES = [
    schedules.constant(0.1),
    schedules.linear_warmup(1.0, 4, start=0.5),
    schedules.cosine(1.0, 10),
    schedules.warmup_cosine(1.0, warmup_steps=2, total_steps=4),
    schedules.step(1.0, every=10),
    schedules.piecewise((1.0, 0.5), boundaries=(10,)),
]
SCALERS = [LossScaler(), *map(LossScaler.like, PRESETS), LossScaler.static(8.0), LossScaler.off(check_finite=True)]
RECORDS: list[Any] = [
    Policy("O2", overrides={"b": "f32", "a/*": "f32"}, op_rules={"exp": "compute"}),
    *SCALERS,
    *(spec() for spec in SPECS),
    polyamp.rmsprop(schedules.cosine(1.0, 10), momentum=0.5, centered=True),
    *SCHEDULES,
    Recipe(),
    Recipe(policy="mixed_float16", scaler="megatron", optimizer=polyamp.sgd(SCHEDULES[3]), clip_norm=1.0),
]
CHANGES: list[tuple[Any, dict[str, Any]]] = [
    (Policy("fp16"), {"mode": "cast"}),
    (LossScaler(), {"hysteresis": 2, "init_scale": 8}),
    (Recipe(), {"policy": "fp16", "accumulate_steps": 4}),
    (polyamp.adamw(), {"betas": (0.5, 0.9)}),
    (schedules.cosine(1.0, 10), {"steps": 5}),
]
WRONG: list[tuple[Any, dict[str, Any], type[PolyampError], str]] = [
    (Policy(), {"compute": "f61"}, PolicyError, r"compute must be one of .*'f61'"),
    (
        Policy(),
        {"comput": "f16"},
        PolicyError,
        r"^Policy has the fields .*\. Received: comput\. Did you mean 'compute'\?$",
    ),
    (LossScaler(), {"init_scale": 0.0}, LossScaleError, r"init_scale must be a positive float32 number"),
    (LossScaler(), {"min_scale": 2.0**20}, LossScaleError, r"init_scale must lie between min_scale and max_scale"),
    (LossScaler(), {"scale": 2.0, "b": 1}, LossScaleError, r"^LossScaler has the fields kind, .*\. Received: b, scale"),
    (Recipe(), {"clip_norm": 0}, RecipeError, r"clip_norm must be None or a finite number above 0"),
    (Recipe(), {"clip": 1.0}, RecipeError, r"^Recipe has the fields .*\. Received: clip\. Did you mean 'clip_norm'\?$"),
    (polyamp.sgd(), {"nesterov": True}, RecipeError, r"nesterov=True needs a momentum above 0"),
    (
        polyamp.sgd(),
        {"lr": 1.0},
        RecipeError,
        r"^SGD has the fields .*\. Received: lr\. Did you mean 'learning_rate'\?$",
    ),
    (schedules.constant(1.0), {"rate": 1.0}, RecipeError, r"^Constant has the fields value\. Received: rate\.$"),
]


class Native:
    """Stands for a framework's own optimizer: equal to itself alone."""


@pytest.mark.parametrize("record", RECORDS, ids=repr)
def test_repr_evaluates_back_and_copies_are_equal(record: Any) -> None:
    copies = [
        eval(repr(record), {name: getattr(polyamp, name) for name in polyamp.__all__}),
        pickle.loads(pickle.dumps(record)),
        copy.copy(record),
        copy.deepcopy(record),
        record.replace(),
        type(record).__replace__(record),
        type(record)(**record.to_dict()),
    ]
    for other in copies:
        assert type(other) is type(record)
        assert other == record
        assert hash(other) == hash(record)
        assert repr(other) == repr(record)
    assert len({*copies, record}) == 1


def test_repr_shows_what_differs_from_the_defaults() -> None:
    assert repr(LossScaler()) == "LossScaler()"
    assert repr(LossScaler(init_scale=16)) == "LossScaler(init_scale=16.0)"
    assert repr(LossScaler.static(8.0)) == "LossScaler(kind='static', init_scale=8.0)"
    assert repr(LossScaler.off(check_finite=True)) == "LossScaler(kind='off', check_finite=True)"
    assert repr(polyamp.adamw()) == "adamw()"
    assert repr(schedules.cosine(1.0, 10)) == "schedules.cosine(peak=1.0, steps=10)"
    assert repr(Recipe()) == "Recipe()"
    recipe = Recipe(policy="bf16", scaler="off", optimizer=polyamp.sgd(schedules.constant(0.1)), clip_norm=1)
    assert repr(recipe) == (
        "Recipe(policy=Policy(param='float32', compute='bfloat16', output='float32'), scaler=LossScaler(kind='off'), "
        "optimizer=sgd(learning_rate=schedules.constant(value=0.1)), clip_norm=1)"
    )


@pytest.mark.parametrize(("record", "changes"), CHANGES, ids=repr)
def test_replace_changes_a_copy(record: Any, changes: dict[str, Any]) -> None:
    before = repr(record)
    ways = [record.replace(**changes), type(record).__replace__(record, **changes)]
    if hasattr(copy, "replace"):
        ways.append(copy.replace(record, **changes))
    expected = type(record)(**{**record.to_dict(), **changes})
    assert ways == [expected] * len(ways)
    assert expected != record
    assert repr(record) == before


@pytest.mark.parametrize(("record", "changes", "kind", "message"), WRONG, ids=repr)
def test_replace_checks_as_the_constructor_does_and_names_unknown_fields(
    record: Any, changes: dict[str, Any], kind: type[PolyampError], message: str
) -> None:
    for replace in (record.replace, record.__replace__):
        with pytest.raises(kind, match=message):
            replace(**changes)


def test_replace_hands_on_no_bounds_that_the_kind_had_settled() -> None:
    new = LossScaler()
    assert LossScaler.off().replace(kind="dynamic") == new
    assert LossScaler.static(8.0).replace(kind="dynamic") == new.replace(init_scale=8.0)
    assert LossScaler.static(8.0).replace(init_scale=4.0) == LossScaler.static(4.0)
    assert LossScaler.static(8.0).replace(kind="off") == LossScaler.off()
    assert new.replace(kind="static", init_scale=8.0) == LossScaler.static(8.0)


@pytest.mark.parametrize("record", RECORDS, ids=repr)
def test_records_are_frozen(record: Any) -> None:
    name = record.field_names[-1]
    word = rf"{type(record).__name__} is frozen; use (policy|scaler|recipe|spec|schedule)\.replace\("
    with pytest.raises(AttributeError, match=rf"{word}{name}=\.\.\.\) to get a changed copy\."):
        setattr(record, name, 1)
    with pytest.raises(AttributeError, match=word):
        record.new = 1
    with pytest.raises(AttributeError, match=word):
        delattr(record, name)


def test_records_of_other_classes_and_values_are_unequal() -> None:
    assert len(set(RECORDS)) == len(RECORDS)
    assert polyamp.adam() != polyamp.adamw(weight_decay=0.0)
    assert LossScaler() != LossScaler(patience=51)
    assert Recipe() != Recipe().to_dict()


def test_a_native_optimizer_is_compared_by_identity() -> None:
    native: Any = Native()
    recipe = Recipe(optimizer=native)
    assert recipe == Recipe(optimizer=native)
    assert hash(recipe) == hash(Recipe(optimizer=native))
    assert recipe.replace(clip_norm=1.0).optimizer is copy.copy(recipe).optimizer is native
    other: Any = Native()
    assert recipe != Recipe(optimizer=other)
    assert isinstance(copy.deepcopy(recipe).optimizer, Native)


@pytest.mark.parametrize(
    ("make", "arguments", "named", "message"),
    [
        (LossScaler, (1.0,), {}, r"LossScaler takes its arguments by name: kind, .*1 positional: 1\.0\. Write Loss.*"),
        (polyamp.lion, (1.0, (0.5, 0.5), 0.0, (), 1), {}, r"lion has the arguments .*Received: 5 positional ones\."),
        (polyamp.sgd, (1.0,), {"learning_rate": 1.0}, r"sgd: 'learning_rate' is given by name and position\."),
        (Recipe, (), {"clip": 1.0}, r"Recipe has the arguments .*Received: clip=\. Did you mean 'clip_norm'\?"),
        (schedules.cosine, (1.0,), {}, r"cosine has the arguments peak, steps, end, origin\. Missing: steps\."),
        (schedules.linear_warmup, (1.0, 4), {"init_value": 0.1}, r".*Received: init_value=\. Did you mean 'start'\?"),
        (schedules.cosine, (), {"init_value": 0.1, "steps": 4}, r".*init_value=\. Did you mean 'peak'\?"),
        (schedules.step, (), {"init_value": 0.1, "every": 4}, r".*init_value=\. Did you mean 'initial'\?"),
    ],
)
def test_wrong_arguments_are_named(make: Any, arguments: tuple[Any, ...], named: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=rf"^{message}$"):
        make(*arguments, **named)


def test_signatures_are_the_fields() -> None:
    shown = inspect.signature(polyamp.lion)
    assert "= 0.0001, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0, groups: " in str(shown)
    line = str(inspect.signature(schedules.linear_warmup))
    assert line == "(peak: float, steps: int, start: float = 0.0, origin: int = 0)"
    parameters = inspect.signature(LossScaler).parameters
    assert tuple(parameters) == LossScaler.field_names
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert "spelling" in inspect.signature(Policy).parameters
    assert list(inspect.signature(SCHEDULES[0]).parameters) == ["count", "xp"], "an instance is a function"


def test_numbers_of_numpy_are_written_as_numbers() -> None:
    half = np.float64(0.5)
    recipe = Recipe(optimizer=polyamp.adamw(half, betas=(half, 0.5)), clip_norm=half)
    plain = json.loads(recipe.to_json())
    assert (plain["clip_norm"], plain["optimizer"]["learning_rate"]) == (0.5, 0.5)
    assert plain["optimizer"]["betas"] == [0.5, 0.5]
    assert Recipe.from_toml(recipe.to_toml()) == recipe

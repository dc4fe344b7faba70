"""`polyamp.compare` on the NumPy reference: what is found, said and refused. Frameworks: `tests/parity`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.errors import ArgumentError, PortError, RecipeError
from polyamp.parity.trainers import OwnLoop
from polyamp.porting.check import Batch
from polyamp.reference import MLP


def models(sizes: list[int] | None = None) -> tuple[MLP, MLP]:
    return MLP.random(sizes or [4, 8, 1], seed=0), MLP.random(sizes or [4, 8, 1], seed=1)


def batch(step: int = 0, rows: int = 16) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    return {"x": rng.standard_normal((rows, 4), np.float32), "y": rng.standard_normal((rows, 1), np.float32)}


def loss_fn(model: Any, data: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(data["x"]), data["y"])


def recipe(**settings: Any) -> polyamp.Recipe:
    return polyamp.Recipe(**{"optimizer": polyamp.adamw(0.01), "clip_norm": 1.0, **settings})


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_ten_steps_of_one_program_agree(policy: str) -> None:
    report = polyamp.compare(*models(), batch, loss_fn, recipe(policy=policy), steps=10)
    assert report.agrees
    assert report.first is None
    assert [len(curve.loss) for curve in report.curves] == [10] * len(report.curves)
    assert report.phases == ["float32", "float64", *([policy] if policy != "float32" else [])]


def test_without_a_recipe_one_pass_is_compared() -> None:
    report = polyamp.compare(*models(), batch()["x"])
    assert report.agrees
    assert report.recipes == {}
    assert {row.stage for row in report.comparisons[0].rows} == {"forward", "backward", "update"}
    assert {row.step for row in report.comparisons[0].rows if row.stage == "update"} == {0}  # what was ported


@pytest.mark.parametrize(
    ("other", "stage", "what", "kind"),
    [
        (recipe(optimizer=polyamp.adamw(0.02)), "update", "parameter", "formula"),
        (recipe(optimizer=polyamp.adamw(0.01, weight_decay=0.0)), "update", "parameter", "formula"),
        (recipe(optimizer=polyamp.adamw(0.01, (0.9, 0.99))), "update", "exp_avg_sq", "factor"),
        (recipe(clip_norm=0.01), "update", "exp_avg", "factor"),
    ],
    ids=["rate", "decay", "beta2", "clip"],
)
def test_another_optimizer_is_found_at_its_update(other: polyamp.Recipe, stage: str, what: str, kind: str) -> None:
    first = polyamp.compare(*models(), batch, loss_fn, (recipe(), other), steps=3).first
    assert first is not None
    assert (first.phase, first.step, first.stage, first.what, first.kind) == ("float32", 1, stage, what, kind)


def test_averages_are_compared() -> None:
    """Another decay is found at the first move that it makes, behind parameters that agree; the same agrees."""
    one, other = (recipe(ema=polyamp.Ema(decay)) for decay in (0.9, 0.99))
    agreed = polyamp.compare(*models(), batch, loss_fn, one, steps=3)
    assert agreed.agrees
    assert {row.name for row in agreed.comparisons[0].rows if row.what == "average"} == {"kernel", "bias"}
    first = polyamp.compare(*models(), batch, loss_fn, (one, other), steps=3).first
    assert first is not None
    assert (first.phase, first.step, first.stage, first.what, first.kind) == (
        "float32",
        2,
        "update",
        "average",
        "formula",
    )
    assert first.evidence[-1] == "Compare decay, warmup and every of ema."


def test_a_schedule_that_is_one_step_late_is_found_at_that_step() -> None:
    early, late = (polyamp.schedules.warmup_cosine(0.1, warmup_steps=steps, total_steps=20) for steps in (4, 5))
    recipes = recipe(optimizer=polyamp.sgd(early)), recipe(optimizer=polyamp.sgd(late))
    first = polyamp.compare(*models(), batch, loss_fn, recipes, steps=4).first
    assert first is not None
    assert (first.stage, first.what) == ("update", "parameter")


def test_another_loss_is_found_behind_outputs_that_agree() -> None:
    def summed(model: Any, data: Any) -> Any:
        return polyamp.losses.mean_squared_error(model(data["x"]), data["y"]) * 16.0

    report = polyamp.compare(*models(), batch, (loss_fn, summed), recipe())
    assert report.first is not None
    assert (report.first.stage, report.first.what, report.first.module) == ("forward", "loss", "")
    assert any("16 times" in said for said in report.first.evidence)


def test_a_loss_that_is_not_finite_on_one_side_is_found() -> None:
    def broken(model: Any, data: Any) -> Any:
        return loss_fn(model, data) / (float(data["x"][0, 0]) - float(data["x"][0, 0]) + 0.0 or float("nan"))

    first = polyamp.compare(*models(), batch, (loss_fn, broken), recipe()).first
    assert first is not None
    assert first.kind == "not finite"
    assert first.what == "loss"
    assert first.distance is None


def test_either_side_gets_its_own_batch() -> None:
    other = {**batch(), "x": batch()["x"] + 1}
    assert polyamp.compare(*models(), Batch(batch(), batch()), loss_fn, recipe()).agrees
    first = polyamp.compare(*models(), lambda step: Batch(batch(), other), loss_fn, recipe()).first
    assert first is not None
    assert (first.stage, first.what, first.module) == ("forward", "input", "dense0")


def test_a_loop_that_begins_without_a_training_is_refused() -> None:
    def begin(model: Any) -> Any:
        return model

    loop = OwnLoop(begin, lambda training, data: (training, 0.0))
    with pytest.raises(ArgumentError, match=r"begin\(model\) must return polyamp.porting.training"):
        polyamp.compare(*models(), batch, loss_fn, (recipe(), loop))


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"steps": 0}, ArgumentError, "steps must be a whole number of at least 1. Received: steps=0"),
        ({"randomness": "on"}, ArgumentError, "randomness must be 'off' or 'shared'"),
        ({"loss_fn": recipe()}, ArgumentError, "loss_fn stands before recipe"),
        ({"loss_fn": None}, ArgumentError, "loss_fn must be given where there is a recipe"),
        ({"recipe": "mixed_float16"}, RecipeError, "recipe must be a polyamp.Recipe, a function of the model"),
        (
            {"randomness": "shared", "recipe": recipe(accumulate_steps=2)},
            RecipeError,
            "other orders where a step has several micro-batches",
        ),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        polyamp.compare(*models(), batch, **{"loss_fn": loss_fn, "recipe": recipe(), **arguments})


def test_models_that_do_not_fit_are_refused_as_a_port_refuses_them() -> None:
    with pytest.raises(PortError, match="have no partner"):
        polyamp.compare(MLP.random([4, 8, 1], seed=0), MLP.random([4, 9, 1], seed=0), batch, loss_fn, recipe())


def test_a_report_has_no_truth_value() -> None:
    with pytest.raises(TypeError, match=r"report\.agrees"):
        bool(polyamp.compare(*models(), batch()["x"]))


def test_the_table_ends_with_the_step_in_which_the_sides_part() -> None:
    report = polyamp.compare(*models(), batch, loss_fn, (recipe(), recipe(optimizer=polyamp.adamw(0.02))), steps=4)
    rows = report.comparisons[0].rows
    assert {row.step for row in rows if row.phase == "float32"} <= {0, 1}
    assert not any(row.counts for row in rows if row.stage in ("forward", "backward"))


def test_a_list_of_batches_comes_in_turn() -> None:
    batches = [batch(0), batch(1)]
    report = polyamp.compare(*models(), batches, loss_fn, recipe(), steps=4)
    assert report.agrees
    again = polyamp.compare(*models(), lambda step: batches[step % 2], loss_fn, recipe(), steps=4)
    assert [curve.loss for curve in report.curves] == [curve.loss for curve in again.curves]


def test_an_error_of_the_program_says_where_it_came() -> None:
    def fails(model: Any, data: Any) -> Any:
        raise KeyError("mask")

    with pytest.raises(KeyError) as caught:
        polyamp.compare(*models(), batch, (loss_fn, fails), recipe(), labels=("mine", "theirs"))
    assert "In a comparison: theirs, float32, step 1." in caught.value.__notes__

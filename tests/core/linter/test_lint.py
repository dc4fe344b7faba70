"""The rules of `polyamp.lint` over figures, its report, and what it refuses; the backends' tests plant the faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import polyamp
from polyamp.errors import ArgumentError, UnsupportedError
from polyamp.linter.lint_report import LintReport
from polyamp.linter.lint_rules import RULES, apply_rules
from polyamp.linter.setup_figures import SensitiveOperation, SetupFigures, StepCall, TrainingSetup, WeightFigures
from polyamp.reference import MLP

CLEAN = SetupFigures(
    backend="torch",
    weights=[WeightFigures(name="head/weight", dtype="float32", moments={"exp_avg": "float32"})],
    scales=False,
    scaler_name="GradScaler",
    operations=[],
    dtypes=["bfloat16", "float32"],
    head={"head/weight": "float32"},
    calls=[],
    records_steps=True,
    overrides={},
)
CLIP, UNSCALE, STEP = (StepCall(action, action, f"loop.py:{n}") for n, action in enumerate(("clip", "unscale", "step")))


def found(**changes: Any) -> list[tuple[str, list[str]]]:
    findings, unchecked = apply_rules(msgspec.structs.replace(CLEAN, **changes))
    assert unchecked == {}
    return [(each.rule, each.places) for each in findings]


def test_a_clean_set_up() -> None:
    assert found() == []
    assert found(scales=True, dtypes=["float16", "float32"]) == []


@pytest.mark.parametrize(
    ("calls", "places"),
    [
        ([CLIP, STEP], ["loop.py:0"]),
        ([UNSCALE, CLIP, STEP], []),
        ([UNSCALE, CLIP, STEP, CLIP, STEP], ["loop.py:0"]),
        ([UNSCALE, STEP, UNSCALE, CLIP, STEP], []),
        ([UNSCALE, UNSCALE, CLIP, CLIP, STEP, STEP], []),
        ([CLIP, UNSCALE, STEP], ["loop.py:0"]),
    ],
)
def test_the_order_of_clip_and_unscaling(calls: list[StepCall], places: list[str]) -> None:
    assert found(calls=calls) == ([("clip_before_unscale", places)] if places else [])


@pytest.mark.parametrize(
    ("dtype", "narrow"), [("float32", False), ("float64", False), ("bfloat16", True), ("int8", True), ("uint8", True)]
)
def test_the_dtype_of_the_head(dtype: str, narrow: bool) -> None:
    assert bool(found(head={"head/weight": dtype})) is narrow


def test_float8_and_quantised_weights_are_no_trained_16_bits() -> None:
    assert found(weights=[WeightFigures(name="a", dtype="float8_e4m3fn", moments={"m": "uint8"})]) == []


def test_globs_and_the_head() -> None:
    assert found(overrides={"*": "float16"}) == [("head_by_glob", ["head"])]
    assert found(overrides={"*": "float32"}) == found(overrides={"head": "float16"}) == []
    assert found(overrides={"*": "float16", "head": "float32"}) == []


def test_every_rule_can_be_broken_at_once_and_the_share_is_of_all_elements() -> None:
    weights = [
        WeightFigures(name=name, dtype="float16", moments={"m": "float16"}, with_gradient=many, unmoved=still)
        for name, many, still in (("a", 100, 100), ("b", 300, 0), ("c", 0, 0), ("d", 0, 0))
    ]
    operations = [SensitiveOperation("a", "norm", "float16", "norm"), SensitiveOperation("", "s", "float16", "softmax")]
    broken = {"operations": operations, "head": {"a/w": "float16"}, "overrides": {"**": "float16"}}
    rules = [rule for rule, _ in found(weights=weights, **broken)]
    rules += [rule for rule, _ in found(scales=True, calls=[CLIP])]
    assert sorted(rules) == sorted(rule.name for rule in RULES)
    (first, *_), _ = apply_rules(msgspec.structs.replace(CLEAN, weights=weights))
    assert first.share == 0.25
    assert first.figure == "trained in float16; 25 % of the weights with a gradient did not move in one step"
    assert first.where == "a, b, c and 1 more"


def test_what_cannot_be_checked_is_named() -> None:
    weights = [WeightFigures(name="a", dtype="float32")]
    figures = SetupFigures(backend="jax", weights=weights, scales=False, scaler_name="")
    assert apply_rules(figures) == (
        [],
        {
            "moments_in_16_bits": "optimizer, loss_fn and batch",
            "norm_in_16_bits": "loss_fn and batch",
            "softmax_in_16_bits": "loss_fn and batch",
            "scaler_without_float16": "loss_fn and batch",
            "float16_without_scaler": "loss_fn and batch",
            "head_in_16_bits": "loss_fn and batch",
        },
    )


def test_a_set_up_runs_with_a_loss_function() -> None:
    assert not TrainingSetup(model=1).runs
    assert TrainingSetup(model=1, loss_fn=print, batch=1).runs


def test_the_report(tmp_path: Path) -> None:
    weights = [WeightFigures(name="body/<w>", dtype="bfloat16")]
    findings, unchecked = apply_rules(SetupFigures(backend="jax", weights=weights, scales=False, scaler_name=""))
    report = LintReport(backend="jax", findings=findings, unchecked=unchecked)
    lines = str(report).splitlines()
    assert lines[:4] == ["1 finding (jax)", "", "parameters_in_16_bits: body/<w>", "  trained in bfloat16"]
    assert lines[-1].startswith("not checked: moments_in_16_bits needs optimizer, loss_fn and batch; ")
    assert repr(report) == str(report)
    assert report.to_dict()["findings"][0]["places"] == ["body/<w>"]
    page = report.save(tmp_path / "lint.html").read_text()
    assert "body/&lt;w&gt;" in page
    assert "Trained in bfloat16." in page
    assert "1 finding" in page
    assert "places of each finding" in page
    with pytest.raises(ArgumentError, match=r"path must end in \.html or \.png"):
        report.save(tmp_path / "lint.txt")


def test_what_lint_refuses() -> None:
    model = MLP.random([2, 1], seed=0)
    with pytest.raises(UnsupportedError, match="the reference backend of this version cannot inspect set-ups"):
        polyamp.lint(model)
    with pytest.raises(ArgumentError, match=r"Received: batch alone\. Pass loss_fn= too"):
        polyamp.lint(model, batch=1)
    with pytest.raises(ArgumentError, match=r"loss_fn must be a function\. Received: 1"):
        polyamp.lint(model, loss_fn=1, batch=1)

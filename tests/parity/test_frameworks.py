"""`polyamp.parity.run` with all three frameworks, each in a process of its own: what agrees, and where one parts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "fixtures"))

import parity_programs as programs

from polyamp import Recipe, adamw
from polyamp.parity import OwnLoop, Report, run

STEPS = 2
LABELS = ("torch", "torch by hand", "jax", "keras")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    plain = Recipe(policy="float32", optimizer=adamw(1e-2), clip_norm=1.0)
    return run(
        dict(
            zip(
                LABELS,
                (programs.in_torch, programs.in_torch, programs.with_flax_epsilon, programs.in_keras),
                strict=True,
            )
        ),
        data=programs.batch,
        loss_fn=programs.loss_fn,
        recipe=dict(
            zip(LABELS, (programs.own_optimizer, OwnLoop(programs.begin, programs.step), plain, plain), strict=True)
        ),
        steps=STEPS,
        out=tmp_path_factory.mktemp("parity"),
    )


def test_every_side_comes_to_its_end(report: Report) -> None:
    assert report.failures == []
    assert [each.side for each in report.environments] == list(LABELS)
    assert {each.parameters for each in report.environments} == {1061}
    assert report.recipes["torch"]["optimizer"] == {"type": "an AdamW (torch)"}
    assert report.recipes["jax"]["optimizer"]["type"] == "adamw"


@pytest.mark.parametrize("label", ["torch by hand", "keras"])
def test_trainings_that_are_the_same_agree(report: Report, label: str) -> None:
    (found,) = [each for each in report.comparisons if each.sides[1] == label]
    assert found.first is None
    compared = {row.what for row in found.rows if row.module == "hidden"}
    assert compared >= {"output", "cotangent", "gradient", "parameter", "exp_avg", "exp_avg_sq"}
    curves = {(curve.side, curve.phase): curve.loss for curve in report.curves}
    assert len(curves[label, "float32"]) == STEPS
    assert curves[label, "float32"] == pytest.approx(curves["torch", "float32"], rel=1e-5)


def test_another_epsilon_is_named(report: Report) -> None:
    (found,) = [each for each in report.comparisons if each.sides[1] == "jax"]
    first = found.first
    assert first is not None
    assert (first.step, first.stage, first.module, first.kind, first.after) == (
        1,
        "forward",
        "norm",
        "epsilon",
        "embed",
    )
    assert "epsilon is 0.01" in " ".join(first.evidence)
    assert list(first.sides) == ["torch", "jax"]
    assert report.first == first

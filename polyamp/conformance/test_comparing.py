"""Rule S31: two trainings are compared on copies, and the first difference that counts is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.conformance.problems import batch, flat_weights, layers, loss_fn, recipe
from polyamp.contract.backend import Backend
from polyamp.contract.harness import Harness
from polyamp.errors import UnsupportedError
from polyamp.parity.trace.observer import HasObserver

SOURCE, TARGET = layers(), layers(seed=7)


def comparison_recipe(**settings: Any) -> polyamp.Recipe:
    """Moments, decay and a clip."""
    settings.setdefault("optimizer", polyamp.adamw(0.05, weight_decay=0.1))
    return recipe("mixed_bfloat16", clip_norm=1.0, **settings)


def other_loss(model: Any, data: Any) -> Any:
    """A mean that somebody takes over one axis alone."""
    return loss_fn(model, data) * 3.0


def is_comparison_refused(backend: Backend, harness: Harness) -> bool:
    """Whether the backend's models cannot be watched; it says so then."""
    if isinstance(backend, HasObserver):
        return False
    with pytest.raises(UnsupportedError, match=f"the {backend.name} backend of this version cannot be watched"):
        polyamp.compare(harness.mlp(SOURCE), harness.mlp(TARGET), batch(), loss_fn)
    return True


def test_s31_the_same_program_agrees_and_no_model_is_changed(backend: Backend, harness: Harness) -> None:
    if is_comparison_refused(backend, harness):
        return
    one, two = harness.mlp(SOURCE), harness.mlp(TARGET)
    report = polyamp.compare(one, two, batch, loss_fn, comparison_recipe(), steps=2)
    assert report.agrees, str(report)
    seen = {(row.stage, row.what) for row in report.comparisons[0].rows}
    assert {("forward", "output"), ("forward", "loss"), ("backward", "gradient"), ("step", "grad_norm")} <= seen
    assert {("step", "finite"), ("step", "scale"), ("update", "exp_avg"), ("update", "parameter")} <= seen
    assert {row.phase for row in report.comparisons[0].rows} == {"float32", "mixed_bfloat16"}
    for model, weights in ((one, SOURCE), (two, TARGET)):
        wanted = np.concatenate([np.ravel(array) for layer in weights for array in layer])
        np.testing.assert_array_equal(flat_weights(harness, polyamp.init(model, comparison_recipe())), wanted)


@pytest.mark.parametrize(
    ("fault", "stage", "what"),
    [
        ({"loss_fn": (loss_fn, other_loss)}, "forward", "loss"),
        (
            {"recipe": (comparison_recipe(), comparison_recipe(optimizer=polyamp.adamw(0.05, weight_decay=0.0)))},
            "update",
            "parameter",
        ),
        (
            {"recipe": (comparison_recipe(), comparison_recipe(optimizer=polyamp.adamw(0.05, (0.8, 0.999))))},
            "update",
            "exp_avg",
        ),
    ],
    ids=["loss", "decay", "beta"],
)
def test_s31_the_first_difference_is_named(
    backend: Backend, harness: Harness, fault: dict[str, Any], stage: str, what: str
) -> None:
    if is_comparison_refused(backend, harness):
        return
    given = {"loss_fn": loss_fn, "recipe": comparison_recipe(), **fault}
    report = polyamp.compare(harness.mlp(SOURCE), harness.mlp(TARGET), batch, **given)
    first = report.first
    assert first is not None
    assert (first.phase, first.step, first.stage, first.what) == ("float32", 1, stage, what)
    assert not report.agrees

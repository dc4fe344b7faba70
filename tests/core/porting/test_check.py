"""`check=`: what is measured of two evaluations, and the sentence that says where they part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from polyamp.errors import PortError
from polyamp.porting.check import Batch
from polyamp.porting.layouts.converter import Evaluation
from polyamp.porting.model_run import fill_and_check
from polyamp.porting.model_side import ModelSide
from polyamp.porting.port_report import CheckResult
from polyamp.porting.transfer_plan import make_transfer_plan
from tests.core.porting.sketch import sketch

Array = np.ndarray[Any, Any]
MODEL = "fc: dense 4 8\nproj: dense 8 4\nhead: dense 4 2"
ROW = np.asarray([[1.0, 2.0, 3.0, 4.0]])
OUT = np.asarray([[1.0, -2.0]])


class Scripted:
    """A converter whose evaluation is what it was given."""

    in_place = False

    def __init__(self, modules: Mapping[str, Array], outputs: Sequence[Array] = (OUT,), **gradients: Array) -> None:
        self.found = Evaluation(outputs, gradients, modules)

    def fill(self, model: Any, leaves: Any) -> Any:
        return model

    def evaluate(self, model: Any, batch: Any, cotangents: Any) -> Evaluation:
        assert [each.shape for each in cotangents(self.found.outputs)] == [each.shape for each in self.found.outputs]
        return self.found


def checked(one: Scripted, two: Scripted) -> CheckResult:
    source, target = sketch(MODEL), sketch(MODEL)
    sides: Any = [ModelSide(source, one, "source"), ModelSide(target, two, "target")]  # type: ignore[arg-type]  # they evaluate
    plan = make_transfer_plan(source, target, None, strict=True)
    return fill_and_check(*sides, plan, Batch(ROW), strict=True).result


def shown(**modules: Array) -> Scripted:
    return Scripted(modules)


def test_s30_outputs_of_layers_are_measured_relative_to_the_largest() -> None:
    found = checked(shown(fc=ROW, proj=OUT), shown(fc=ROW + 4e-6, proj=OUT))
    assert found.modules == pytest.approx({"fc": 1e-6, "proj": 0.0}, rel=1e-3)
    assert found.outputs == 0.0
    assert found.gradients == {}


@pytest.mark.parametrize(
    ("ours", "theirs", "error"),
    [
        ((2, 1, 3), (2, 3), 0.0),  # axes of 1 are nothing
        ((1, 3), (2, 3), None),  # one side gives rows that the other gives once
        ((2, 3), (1, 3), None),
        ((2, 3), (3, 2), float("inf")),
        ((2, 3), (2, 4), float("inf")),
        ((2, 1), (1, 3), float("inf")),  # they broadcast, to the shape of neither
        ((0, 3), (0, 3), 0.0),
    ],
)
def test_s30_outputs_of_layers_that_have_two_shapes(ours: Any, theirs: Any, error: float | None) -> None:
    """Those that no rows explain differ; nothing is made of what broadcasts."""
    found = checked(shown(fc=np.ones(ours)), shown(fc=np.ones(theirs)))
    assert found.modules == ({} if error is None else {"fc": error})


def test_s30_a_nan_agrees_with_a_nan_in_its_place_alone() -> None:
    spoilt, moved = ROW.copy(), ROW.copy()
    spoilt[0, 1] = moved[0, 2] = np.nan
    assert checked(shown(fc=spoilt), shown(fc=spoilt)).modules == {"fc": 0.0}
    assert checked(shown(fc=spoilt), shown(fc=moved)).modules == {"fc": float("inf")}
    assert checked(shown(fc=spoilt), shown(fc=ROW)).modules == {"fc": float("inf")}


def differing(one: Scripted, two: Scripted) -> str:
    two.found = two.found._replace(outputs=[OUT * 2])
    with pytest.raises(PortError) as caught:
        checked(one, two)
    return str(caught.value)


def test_s30_the_first_layer_that_differs_is_named_with_the_one_before() -> None:
    said = differing(shown(fc=ROW, proj=ROW, head=OUT), shown(fc=ROW, proj=ROW * 2, head=OUT * 2))
    assert "the outputs differ by 5.0e-01 (relative), 1e-05 is allowed." in said
    assert said.endswith("The first layer whose output differs, after 'fc', which agrees, is 'proj' (5.0e-01).")


def test_s30_layers_that_nobody_saw_are_named() -> None:
    said = differing(shown(fc=ROW, head=OUT), shown(fc=ROW, head=OUT * 2))
    assert said.endswith("is 'head' (5.0e-01). Layers there whose outputs are not shown by both sides: 'proj'.")
    said = differing(shown(fc=ROW, proj=ROW, head=OUT), shown(fc=ROW, proj=ROW, head=OUT))
    assert said.endswith("All matched layers agree, 'head' the last of them: what differs comes after it.")
    said = differing(shown(), shown(fc=ROW))
    assert (
        "No layer shows its output on both sides. Layers there whose outputs are not shown by both sides: 'fc', "
        in said
    )


def test_s30_outputs_of_two_shapes_are_refused_with_both() -> None:
    one, two = shown(fc=ROW), Scripted({"fc": ROW}, [np.ones((1, 3))])
    with pytest.raises(
        PortError, match=r"the source's outputs have shapes \[\[1, 2\]\] and the target's \[\[1, 3\]\]\. "
    ):
        checked(one, two)


def test_s30_a_source_without_a_model_cannot_be_checked() -> None:
    sides: Any = [ModelSide(sketch(MODEL), None, None), ModelSide(sketch(MODEL), shown(), "target")]  # type: ignore[arg-type]
    with pytest.raises(PortError, match=r"check= runs both models, and the source is no model but its weights\."):
        fill_and_check(
            *sides, make_transfer_plan(sketch(MODEL), sketch(MODEL), None, strict=True), Batch(ROW), strict=True
        )

"""Units of a ReLU that rounding switches on one side alone, and what is none: zeros of both sides, of smooth models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polyamp.contract.casting_report import OperationCount
from polyamp.parity.precisions import FLOAT32, POLICY, Phase
from polyamp.parity.report_data import Comparison
from polyamp.parity.trace.sketch import sketch
from polyamp.parity.trace.trace import Entry, Stage, Trace
from polyamp.parity.verdict.alignment import Alignment
from polyamp.parity.verdict.distances import EntryPair
from polyamp.parity.verdict.step_entries import PhaseTrace
from polyamp.parity.verdict.unit_switches import UnitSwitches, has_thresholds
from polyamp.parity.verdict.verdict import compare_traces
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe

RECIPE = Recipe(policy=Policy.of("mixed_bfloat16"))
BRAIN = 2.0**-8


def operations(*names: str) -> list[OperationCount]:
    return [OperationCount("fc", name, "bfloat16", "", 1) for name in names]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("linear", "relu"), True),
        (("dot_general", "max"), True),
        (("Conv2D", "MaxPool"), True),
        (("dot_general", "reduce_max", "exp", "reduce_sum"), False),
        (("linear", "gelu", "layer_norm", "softmax"), False),
    ],
    ids=lambda given: given[-1] if isinstance(given, tuple) else "",
)
def test_operations_say_whether_units_can_switch(names: tuple[str, ...], expected: bool) -> None:
    assert has_thresholds(operations(*names)) is expected


def recorded(one: Any, two: Any, *names: str) -> float:
    switches = UnitSwitches([Trace(side="", phase=POLICY, operations=operations(*names))], BRAIN)
    sketches = [sketch(np.asarray(array, np.float32), "float32") for array in (one, two)]
    entries = [Entry(step=1, stage="backward", module="fc", what="gradient", sketch=each) for each in sketches]
    switches.observe(EntryPair(*entries), 4)
    return switches.share


def test_the_share_is_that_of_elements_that_are_0_on_one_side_alone() -> None:
    one = np.random.default_rng(0).standard_normal((8, 16))
    one[2] = one[:, 3] = 0.0  # a row that is padded, a unit that is off
    two = one.copy()
    two[0, 0] = 0.0

    assert recorded(one, one * 1.3, "relu") == 0.0
    assert recorded(one, two, "relu") == pytest.approx(abs(one[0, 0]) / np.linalg.norm(one))
    assert recorded(one, two) == recorded(one, two, "relu")  # nothing recorded: a threshold is not excluded
    assert recorded(one, two, "gelu") == 0.0


def test_more_than_rounding_switches_is_another_formula() -> None:
    one = np.ones((8, 16))
    two = one.copy()
    two[:4] = 0.0
    assert recorded(one, two, "relu") == 0.0


def side(relu: bool, factor: float, switched: int, noise: int) -> list[PhaseTrace]:
    """One pass in float32 and one in bfloat16, whose gradients are multiplied by a factor in the latter alone."""
    rng = np.random.default_rng(0)
    cotangent, gradient = rng.standard_normal((2, 16, 16)).astype("f4")
    cotangent = np.where(cotangent > 0, cotangent, 0) if relu else cotangent
    cotangent[4:6] = 0.0

    def run(phase: str, by: float, off: int) -> PhaseTrace:
        def entry(stage: Stage, what: str, array: Any, name: str = "") -> Entry:
            error = 1.0 + (0.0 if phase == FLOAT32 else BRAIN) * np.random.default_rng(noise).standard_normal((16, 16))
            made = sketch((array * error).astype("f4"), "float32")
            return Entry(step=1, stage=stage, module="fc", what=what, name=name, sketch=made)

        shown = cotangent.copy().reshape(-1)
        shown[np.argsort(-np.abs(shown))[:off]] = 0.0
        lost = 1.0 - 0.12 * off  # what of the gradient comes from the units that are off
        found = [
            entry("forward", "output", np.ones((16, 16))),
            entry("backward", "cotangent", shown.reshape(16, 16)),
            entry("backward", "gradient", by * lost * gradient, "kernel"),
        ]
        rows = operations("linear", "relu" if relu else "gelu")
        return PhaseTrace(Trace(side="", phase=phase, operations=rows), lambda: found)

    return [run(FLOAT32, 1.0, 0), run(POLICY, factor, switched)]


def judged(one: list[PhaseTrace], two: list[PhaseTrace]) -> Comparison:
    phases = (Phase(name=FLOAT32, title=FLOAT32), Phase(name=POLICY, title="mixed_bfloat16"))
    agreed = Alignment(modules={"fc": "fc", "": ""}, layer_kinds={"fc": "dense"})
    runs = [(phase, *both) for phase, *both in zip(phases, one, two, strict=True)]
    return compare_traces(("one", "two"), runs, agreed, (RECIPE, RECIPE))


@pytest.mark.parametrize("relu", [True, False], ids=["relu", "gelu with padding"])
def test_gradients_times_a_factor_are_found_under_bfloat16(relu: bool) -> None:
    first = judged(side(relu, 1.0, 0, 1), side(relu, 1.3, 0, 2)).first
    assert first is not None
    assert (first.phase, first.stage, first.what) == ("mixed_bfloat16", "backward", "gradient")
    assert judged(side(relu, 1.0, 0, 1), side(relu, 1.0, 0, 2)).first is None


def test_a_unit_that_switched_on_one_side_explains_its_part_of_the_gradient() -> None:
    assert judged(side(True, 1.0, 0, 1), side(True, 1.0, 1, 2)).first is None
    assert judged(side(False, 1.0, 0, 1), side(False, 1.0, 1, 2)).first is not None


def inside_a_layer(factor: float, lost: float, *, shown: bool = False) -> Comparison:
    """A convolution with the ReLU inside on one side: a unit of column 3 switched, gradients of it `lost`, all times
    `factor`."""
    rng = np.random.default_rng(3)
    output = np.maximum(rng.standard_normal((2, 5, 5, 12)), 0.0)
    cotangent = np.where(output > 0, rng.standard_normal(output.shape), 0.0)
    kernel = rng.standard_normal((3, 3, 2, 12))

    def run(phase: str, switched: bool, by: float) -> PhaseTrace:
        def entry(stage: Stage, what: str, array: Any, name: str = "") -> Entry:
            made = sketch(np.asarray(array, "f4"), "float32")
            return Entry(step=1, stage=stage, module="conv", what=what, name=name, sketch=made)

        given, gradient = output.copy(), by * kernel
        if switched:
            given[0, 2, 2, 3] = 0.001
            gradient[..., 3] *= 1.0 - lost
        found = [entry("forward", "output", given), entry("backward", "gradient", gradient, "kernel")]
        if shown:
            found.insert(1, entry("backward", "cotangent", cotangent))
        trace = Trace(side="", phase=phase, operations=operations("conv", "relu"))
        return PhaseTrace(trace, lambda: found)

    output[0, 2, 2, 3] = 0.0
    ours = [run(FLOAT32, False, 1.0), run(POLICY, False, 1.0)]
    return judged_convolution(ours, [run(FLOAT32, False, 1.0), run(POLICY, lost > 0, factor)])


def judged_convolution(one: list[PhaseTrace], two: list[PhaseTrace]) -> Comparison:
    phases = (Phase(name=FLOAT32, title=FLOAT32), Phase(name=POLICY, title="mixed_bfloat16"))
    agreed = Alignment(modules={"conv": "conv", "": ""}, layer_kinds={"conv": "conv"})
    runs = [(phase, *both) for phase, *both in zip(phases, one, two, strict=True)]
    return compare_traces(("one", "two"), runs, agreed, (RECIPE, RECIPE))


def test_a_unit_that_switched_inside_a_layer_explains_its_column() -> None:
    assert inside_a_layer(1.0, 0.7).first is None
    whole = inside_a_layer(1.0, 0.7, shown=True).first  # the gradient that reaches the output shows no switch
    assert whole is not None
    assert whole.what == "gradient"


def test_a_factor_is_no_switch_inside_a_layer() -> None:
    for lost in (0.0, 0.0001):
        first = inside_a_layer(1.3, lost).first
        assert first is not None
        assert (first.what, first.phase) == ("gradient", "mixed_bfloat16")

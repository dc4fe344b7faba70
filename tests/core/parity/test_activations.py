"""A layer whose partner has its activation inside: its output is compared, behind that activation, and shown once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polyamp.parity.precisions import FLOAT32, Phase
from polyamp.parity.trace.sketch import sketch
from polyamp.parity.trace.trace import BEFORE_ACTIVATION, Entry, Trace
from polyamp.parity.verdict.alignment import Alignment
from polyamp.parity.verdict.step_entries import PhaseTrace
from polyamp.parity.verdict.verdict import compare_traces

PLAIN, ACTIVE = np.float32([-1.0, 2.0]), np.float32([0.0, 2.0])
"""What a layer gives before its ReLU, and behind it."""


def entry(what: str, values: Any, *, module: str = "fc", step: int = 1) -> Entry:
    array = sketch(np.asarray(values, np.float32), "float32")
    return Entry(step=step, stage="forward", module=module, what=what, sketch=array)


def comparison(ours: list[Entry], theirs: list[Entry], agreed: Alignment) -> Any:
    trace = Trace(side="", phase=FLOAT32)
    runs = [(Phase(name=FLOAT32), PhaseTrace(trace, lambda: ours), PhaseTrace(trace, lambda: theirs))]
    return compare_traces(("one", "two"), runs, agreed, (None, None))


def agreed(**between: dict[str, str]) -> Alignment:
    return Alignment(modules={"fc": "fc", "head": "head"}, layer_kinds={"fc": "dense", "head": "dense"}, **between)  # type: ignore[arg-type]


def outputs(found: Any) -> list[tuple[str, str, bool]]:
    """Module, quantity, and whether it differs, of every row of the table."""
    return [(row.module, row.what, row.counts) for row in found.rows]


HEAD = entry("output", [1.0, 1.0], module="head")
OURS = [entry("output", PLAIN), entry("output, relu", ACTIVE), HEAD]


def test_s31_an_output_is_compared_behind_the_activation_that_the_partner_has_inside() -> None:
    """One row for the layer. The output before it has no partner, and is none of the other's output."""
    found = comparison(OURS, [entry("output", ACTIVE), HEAD], agreed(activations_after_first={"fc": "relu"}))
    assert outputs(found) == [("fc", "output, relu", False), ("head", "output", False)]
    assert found.first is None


def test_s31_a_difference_is_found_behind_the_activation() -> None:
    found = comparison(OURS, [entry("output", [0.0, 2.5]), HEAD], agreed(activations_after_first={"fc": "relu"}))
    assert outputs(found)[0] == ("fc", "output, relu", True)
    assert (found.first.module, found.first.stage) == ("fc", "forward")


def test_s31_a_layer_that_shows_its_output_before_its_own_activation_agrees_too() -> None:
    """Some layers have an activation and show what they gave before it: the row is that of the plain outputs."""
    found = comparison(OURS, [entry("output", PLAIN), HEAD], agreed(activations_after_first={"fc": "relu"}))
    assert outputs(found) == [("fc", "output", False), ("head", "output", False)]


def test_s31_where_the_activation_changes_nothing_the_row_is_still_that_behind_it() -> None:
    ours = [entry("output", ACTIVE), entry("output, relu", ACTIVE), HEAD]
    found = comparison(ours, [entry("output", ACTIVE), HEAD], agreed(activations_after_first={"fc": "relu"}))
    assert outputs(found)[0] == ("fc", "output, relu", False)


def test_s31_small_outputs_that_agree_neither_before_nor_behind_the_activation_differ() -> None:
    small = np.float32(1e-6)
    ours = [entry("output", small * PLAIN), entry("output, relu", small * ACTIVE), HEAD]
    found = comparison(
        ours, [entry("output", small * np.float32([-1.1, 2.2])), HEAD], agreed(activations_after_first={"fc": "relu"})
    )
    assert outputs(found)[0] == ("fc", "output, relu", True)


@pytest.mark.parametrize("ours", [PLAIN, ACTIVE])
def test_s31_where_the_first_side_has_the_activation_inside_the_second_is_shown_behind_it(ours: Any) -> None:
    theirs = [entry(BEFORE_ACTIVATION, PLAIN), entry("output", ACTIVE), HEAD]
    found = comparison([entry("output", ours), HEAD], theirs, agreed(activations_after_second={"fc": "relu"}))
    assert outputs(found) == [("fc", "output", False), ("head", "output", False)]
    wrong = comparison([entry("output", [0.5, 3.0]), HEAD], theirs, agreed(activations_after_second={"fc": "relu"}))
    assert (outputs(wrong)[0], wrong.first.module) == (("fc", "output", True), "fc")

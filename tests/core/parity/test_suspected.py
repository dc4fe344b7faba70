"""A model's output that differs is only suspected: what the losses make of it decides."""

from __future__ import annotations

import numpy as np
import pytest

from polyamp.parity.precisions import FLOAT32, Phase
from polyamp.parity.report_data import Comparison
from polyamp.parity.trace.sketch import sketch
from polyamp.parity.trace.trace import Entry, Stage, Trace
from polyamp.parity.verdict.alignment import Alignment
from polyamp.parity.verdict.step_entries import PhaseTrace
from polyamp.parity.verdict.verdict import compare_traces

LOGITS = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)


def run(output: float, cotangent: float, loss: float) -> PhaseTrace:
    def array(stage: Stage, module: str, what: str, factor: float) -> Entry:
        made = sketch(LOGITS * np.float32(factor) + np.float32(factor - 1.0), "float32")
        return Entry(step=1, stage=stage, module=module, what=what, sketch=made, own=module)

    found = [
        array("forward", "fc", "output", 1.0),
        array("forward", "", "output", output),
        Entry(step=1, stage="forward", module="", what="loss", number=loss),
        array("backward", "", "cotangent", output),
        array("backward", "fc", "cotangent", cotangent),
    ]
    return PhaseTrace(Trace(side="a", phase=FLOAT32), lambda: found)


def of(other: PhaseTrace) -> Comparison:
    phase = Phase(name=FLOAT32)
    agreed = Alignment(modules={"": "", "fc": "fc"}, layer_kinds={"fc": "dense"})
    return compare_traces(("a", "b"), [(phase, run(1.0, 1.0, 0.5), other)], agreed, (None, None))


def test_losses_of_other_outputs_that_agree() -> None:
    found = of(run(3.0, 1.0, 0.5))
    assert found.first is None
    assert any("logits and log-probabilities" in note for note in found.notes)


@pytest.mark.parametrize(("cotangent", "loss"), [(1.0, 0.7), (2.0, 0.5)])
def test_what_follows_differs_too(cotangent: float, loss: float) -> None:
    first = of(run(3.0, cotangent, loss)).first
    assert first is not None
    assert (first.stage, first.module, first.what) == ("forward", "", "output")
    assert first.after == "fc"
    assert first.sentence == "a computes fc, b does not: another formula in the output of the model."

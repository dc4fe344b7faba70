"""Gradients under a policy that are 0 but for rounding: frameworks may leave what they like of them, and no more."""

from __future__ import annotations

import numpy as np
import pytest

import polyamp
from polyamp.parity.precisions import FLOAT32, POLICY, Phase
from polyamp.parity.report_data import Divergence
from polyamp.parity.trace.sketch import sketch
from polyamp.parity.trace.trace import Entry, Trace
from polyamp.parity.verdict.alignment import Alignment
from polyamp.parity.verdict.step_entries import PhaseTrace
from polyamp.parity.verdict.verdict import compare_traces

RECIPE = polyamp.Recipe(policy="mixed_bfloat16")


def ran(size: float, seed: int) -> PhaseTrace:
    """A bias's gradient of this size beside a kernel's of size 1, which both sides share."""
    noise = size * np.random.default_rng(seed).standard_normal(16)
    kernel = np.random.default_rng(9).standard_normal(64)
    found = [
        Entry(step=1, stage="backward", module="conv", what="gradient", name=name, sketch=sketch(array, "float32"))
        for name, array in (("kernel", kernel.astype("f4")), ("bias", noise.astype("f4")))
    ]
    return PhaseTrace(Trace(side="a", phase=""), lambda: found)


def first(ours: tuple[float, float], theirs: tuple[float, float]) -> Divergence | None:
    """Where two sides part whose bias's gradients have these sizes in float32 and under the policy."""
    runs = [
        (Phase(name=name), ran(ours[place], place), ran(theirs[place], 2 + place * (theirs[place] != ours[place])))
        for place, name in enumerate((FLOAT32, POLICY))
    ]
    return compare_traces(("a", "b"), runs, Alignment(modules={"conv": "conv"}), (RECIPE, RECIPE)).first


@pytest.mark.parametrize("left", [7e-5, 0.04, 0.5])
def test_what_rounding_leaves_of_a_gradient_of_0_is_each_frameworks_own(left: float) -> None:
    assert first((1e-9, 7e-5), (1e-9, left)) is None


def test_a_gradient_that_one_side_alone_lost_to_rounding_counts() -> None:
    found = first((1e-9, 1e-9), (1e-9, 4.0))
    assert found is not None
    assert (found.stage, found.module, found.name) == ("backward", "conv", "bias")

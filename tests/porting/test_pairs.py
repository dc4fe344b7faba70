"""Every layer and every fixture model in every ordered pair of libraries: moved, run, moved back (issue's "must hold").

One process per framework does the work (`worker`), once; these tests compare what the processes left, and import no
framework themselves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.fixtures.port.common import MODELS
from tests.porting.libraries import CURVES, NEEDS_BATCH, PAIRS, POLICIES, REFUSED, STEPS, TRAINED, compared, shared
from tests.porting.workers import Findings

OUTPUTS, GRADIENTS, MERGED, FLOAT32 = 1e-5, 1e-4, 1e-6, 5e-5
"""Relative: outputs, a parameter's gradient, outputs of a way back with a merge, two float32 curves (S21)."""
DEPENDS = ("layer/conv2d_same_strided",)
"""Alike for some sizes of what they are given alone, which no layer knows."""


def distance(one: Any, other: Any) -> float:
    """The largest difference over the largest value."""
    a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
    assert a.shape == b.shape
    assert np.isfinite(a).all()
    return float(np.max(np.abs(a - b)) / np.max(np.abs(a)))


def apart(one: Any, other: Any) -> float:
    """The largest distance of two curves, relative to the larger loss at that step."""
    a, b = np.asarray(one), np.asarray(other)
    return float(np.max(np.abs(a - b) / np.maximum(np.abs(a), np.abs(b))))


def moves(findings: Findings, item: str, source: str, target: str) -> None:
    """Outputs are the source's; the way back is the source again, bit for bit unless a merge is named."""
    loaded = findings.of("load", item, source, target)
    expected = findings.of("export", item, source)["output"]
    assert distance(expected, loaded["output"]) <= OUTPUTS
    back = findings.of("back", item, source, target)
    merges = loaded["report"]["merges"] + back["report"]["merges"]
    if back["changed"]:
        assert merges, f"{back['changed']} are not what they were, and no report names a merge"
        assert distance(expected, back["output"]) <= MERGED


@pytest.mark.parametrize(("case", "source", "target"), shared("layer"))
def test_a_layer_moves_and_comes_back(findings: Findings, case: str, source: str, target: str) -> None:
    if (case, target) in REFUSED:
        record = findings.found["load", f"layer/{case}", source, target]
        assert record["error"].startswith(f"PortError: {REFUSED[case, target]}")
        return
    moves(findings, f"layer/{case}", source, target)


@pytest.mark.parametrize(("model", "source", "target"), shared("model"))
def test_a_model_moves_and_comes_back(findings: Findings, model: str, source: str, target: str) -> None:
    moves(findings, f"model/{model}", source, target)


@pytest.mark.parametrize(("source", "target"), [pair for pair in PAIRS if pair[1] in NEEDS_BATCH])
def test_without_a_batch_a_model_moves_or_is_refused(findings: Findings, source: str, target: str) -> None:
    """Where only names and shapes are known: never a guess."""
    bare = {
        key[1]: record for key, record in findings.found.items() if key[0] == "bare" and key[2:] == (source, target)
    }
    assert len(bare) == len(MODELS) + 1
    for item, record in bare.items():
        if record["error"] is not None:
            assert record["error"].startswith("PortError: "), record["traceback"]
        else:
            assert distance(findings.of("export", item, source)["output"], record["output"]) <= OUTPUTS, item


@pytest.mark.parametrize(("model", "source", "target"), shared("model"))
def test_a_moved_model_has_the_same_gradients(findings: Findings, model: str, source: str, target: str) -> None:
    checked = findings.of("check", f"model/{model}", source, target)
    assert checked["outputs"] <= OUTPUTS
    errors = checked["gradients"]
    assert errors
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= GRADIENTS, worst


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_clean_pair_raises_no_alarm(findings: Findings, source: str, target: str) -> None:
    """All of these compute the same function on both sides, so that no attribute may be said to differ."""
    alarms = {
        key[1]: record["report"]["differences"]
        for key, record in findings.found.items()
        if key[0] == "load" and key[2:] == (source, target) and record["error"] is None and key[1] not in DEPENDS
        if record["report"]["differences"]
    }
    assert not alarms, "\n".join(f"{item}: {'; '.join(said)}" for item, said in alarms.items())


@pytest.mark.parametrize(("model", "one", "other"), compared())
def test_s21_a_moved_model_trains_alike(findings: Findings, model: str, one: str, other: str) -> None:
    curves = [findings.of("curve", f"model/{model}", each, "float32")["losses"] for each in (one, other)]
    assert [len(losses) for losses in curves] == [STEPS, STEPS]
    assert apart(*curves) < FLOAT32


@pytest.mark.parametrize(("library", "model"), list(CURVES.items()))
def test_s21_a_moved_model_trains_alike_in_16_bits(findings: Findings, model: str, library: str) -> None:
    both = TRAINED, library
    curves = {
        (each, policy): findings.of("curve", f"model/{model}", each, policy)["losses"]
        for each in both
        for policy in POLICIES
    }
    own = [apart(*(curves[each, policy] for policy in POLICIES)) for each in both]
    assert all(0.0 < value < 0.2 for value in own), own
    assert apart(*(curves[each, POLICIES[1]] for each in both)) <= 2.0 * max(own)

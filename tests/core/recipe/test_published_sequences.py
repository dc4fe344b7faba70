"""S16: every preset has the scales of its source, for all sequences of 8 flags, against transcriptions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from polyamp import LossScaler, LossScaleState
from polyamp.array_namespace import PYTHON
from polyamp.conformance import published_scalers
from polyamp.conformance.published_scalers import OVERFLOWS, PUBLISHED_SCALERS
from polyamp.recipe.scaler import PRESETS
from tests.core.recipe.published_cases import CASES, PublishedCase

SEQUENCES = list(itertools.product([False, True], repeat=8))


def trace(scaler: LossScaler, overflows: Sequence[bool]) -> list[float]:
    state, scales = LossScaleState(scaler.init_scale, 0, scaler.hysteresis, 0, 0), []
    for overflow in overflows:
        state = scaler.next_state(state, not overflow, PYTHON)
        scales.append(float(state.scale))
    return scales


def label(case: PublishedCase) -> str:
    return "-".join([case.rule.__name__, *(str(value) for value in case.arguments.values())])


@pytest.mark.parametrize("case", CASES, ids=label)
def test_s16_a_preset_has_the_scales_of_its_source(case: PublishedCase) -> None:
    scaler = LossScaler.like(case.preset, **case.changes)
    stopped = 0
    for overflows in SEQUENCES:
        want = list(case.rule(overflows, **case.arguments))
        assert trace(scaler, overflows)[: len(want)] == want, overflows
        stopped += len(want) < len(overflows)
    assert bool(stopped) == (case.rule is published_scalers.deepspeed), (
        "only DeepSpeed's ZeRO class ends a run, at the floor"
    )


def test_s16_the_table_in_the_semantics_is_what_the_sources_do() -> None:
    semantics = Path(__file__).parents[3] / "docs" / "semantics.md"
    if not semantics.exists():
        pytest.skip("the documentation is not part of an installed package")
    rows = [line.split() for line in semantics.read_text(encoding="utf-8").splitlines()]
    tables = {name: row for name in PUBLISHED_SCALERS for row in rows if row[:1] == [name]}
    assert set(tables) == set(PUBLISHED_SCALERS)
    for name, reference in PUBLISHED_SCALERS.items():
        assert [float(cell) for cell in tables[name][1:19]] == reference.scales(), name
    flags = next(row[1:] for row in rows if row[:1] == ["overflow"])
    assert [int(flag) for flag in flags] == OVERFLOWS


def test_s16_every_preset_has_a_transcription() -> None:
    assert {case.preset for case in CASES} == set(PRESETS)
    assert len({(case.rule, *case.arguments.items()) for case in CASES}) == len(CASES)


def test_s16_deepspeed_and_flax_grow_one_step_later_and_differ_from_each_other() -> None:
    """What the option is for: a rule without it has torch's sequence, and the two delays are two sequences."""
    overflows = [False] * 8
    traces = {
        name: trace(LossScaler.like(name, init_scale=2.0, growth_interval=2), overflows)
        for name in ("torch", "deepspeed", "flax")
    }
    assert traces["torch"] == [2, 4, 4, 8, 8, 16, 16, 32]
    assert traces["deepspeed"] == [2, 2, 4, 4, 8, 8, 16, 16]
    assert traces["flax"] == [2, 2, 4, 4, 4, 8, 8, 8]


def test_s16_deepspeed_raises_at_the_floor_where_polyamp_stays_there() -> None:
    scaler = LossScaler.like("deepspeed", init_scale=2.0, hysteresis=1)
    theirs = list(published_scalers.deepspeed([True] * 8, scale=2.0, interval=1000, hysteresis=1))
    assert theirs == [1.0]
    assert trace(scaler, [True] * 8) == [1.0] * 8


def test_s15_a_smaller_growth_interval_still_lets_the_scale_grow() -> None:
    """A run that goes on with another interval: the count is beyond it already."""
    scaler = LossScaler(init_scale=16.0, growth_interval=4)
    state = scaler.next_state(LossScaleState(16.0, 1500, 1, 0, 0), True, PYTHON)
    assert (state.scale, state.good_steps) == (32.0, 0)

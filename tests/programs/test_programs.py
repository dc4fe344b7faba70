"""Programs as people publish them train in all three frameworks: one recipe file, one `loss_fn`, one curve (S21).

Each framework trains all of them in a process of its own (`python -m tests.programs FRAMEWORK`), at the same time.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.programs.__main__ import POLICIES, PROGRAMS, STEPS

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ("torch", "tensorflow", "jax")
COMPARED = [name for name in PROGRAMS if name != "mnist"]
"""Dropout draws other masks in every framework."""
FLOAT32 = 5e-5
"""S21: what two float32 curves may differ by, relative."""

Curves = dict[str, dict[str, dict[str, list[float]]]]


@pytest.fixture(scope="module")
def curves() -> Curves:
    """Framework -> program -> policy -> losses."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}
    running = {
        name: subprocess.Popen(
            [sys.executable, "-m", "tests.programs", name],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in FRAMEWORKS
    }
    found = {}
    for name, process in running.items():
        out, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
        found[name] = json.loads(out.splitlines()[-1])
    return found


def distance(one: Any, other: Any) -> float:
    """The largest distance of two curves, relative to the larger loss at that step."""
    a, b = np.asarray(one), np.asarray(other)
    return float(np.max(np.abs(a - b) / np.maximum(np.abs(a), np.abs(b))))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_trains(curves: Curves, program: str, framework: str) -> None:
    for policy in POLICIES:
        losses = curves[framework][program][policy]
        assert len(losses) == STEPS
        assert np.isfinite(losses).all()
        if program != "dcgan":  # two players: their losses go up and down
            assert sum(losses[-2:]) < 0.95 * sum(losses[:2]), policy


@pytest.mark.parametrize("program", COMPARED)
def test_s21_a_program_has_one_curve_in_float32(curves: Curves, program: str) -> None:
    for one, other in itertools.combinations(FRAMEWORKS, 2):
        assert distance(curves[one][program]["float32"], curves[other][program]["float32"]) < FLOAT32, (one, other)


@pytest.mark.parametrize("program", COMPARED)
def test_s21_16_bits_part_no_further_than_from_float32(curves: Curves, program: str) -> None:
    own = {name: distance(*curves[name][program].values()) for name in FRAMEWORKS}
    assert all(0.0 < value < 0.2 for value in own.values()), own
    for one, other in itertools.combinations(FRAMEWORKS, 2):
        apart = distance(curves[one][program]["mixed_bfloat16"], curves[other][program]["mixed_bfloat16"])
        assert apart <= 2.0 * max(own[one], own[other]), (one, other)

"""Fifty trials of the soak, some of every engine; `make soak` runs a thousand.

Each framework's run in a process of their own, as there.
"""

from __future__ import annotations

import json

import pytest

from tests.soak import __main__ as soak
from tests.soak.trial import ENGINES, SHARED, Outcome, draw, untouched

EACH = {"torch": 7, "jax": 4, "tensorflow": 10}
"""Framework -> trials of each of its engines; 50 in all."""


def seeds(framework: str) -> list[int]:
    """The first ones of every engine, four at most of those that differ in their data alone."""
    found: list[int] = []
    for engine in ENGINES[framework]:
        those = (seed for seed in range(10_000) if seed % SHARED[framework] < 4)
        each = (seed for seed in those if draw(framework, seed).engine == engine)
        found += [next(each) for _ in range(EACH[framework])]
    return found


def test_there_are_fifty_trials() -> None:
    drawn = [draw(framework, seed) for framework in ENGINES for seed in seeds(framework)]
    assert len(drawn) >= 50
    assert {trial.engine for trial in drawn} == {engine for engines in ENGINES.values() for engine in engines}
    assert {(trial.framework, trial.norm) for trial in drawn} >= {("torch", "batch"), ("torch", "")}
    assert {trial.policy for trial in drawn} == {"float32", "mixed_bfloat16", "mixed_float16"}
    assert all(1 <= sum(trial.skipped) <= 3 for trial in drawn)
    assert {replica for trial in drawn for _, replica, _ in trial.overflows} == {0, 1, 2, 3}


@pytest.mark.parametrize("framework", list(ENGINES))
def test_s09_s12_replicas_hold_the_same_bits_and_train_as_one_device(framework: str) -> None:
    found = list(soak.outcomes(framework, seeds(framework), silence=240.0))
    assert {each.seed: each.failures for each in found if each.failures} == {}
    assert sorted(each.seed for each in found) == sorted(seeds(framework))
    assert sum(each.skipped for each in found) == sum(sum(draw(framework, each.seed).skipped) for each in found)


def test_a_process_that_dies_owes_its_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak.sys, "executable", "false")
    found = list(soak.outcomes("torch", [3, 4], silence=60.0))
    assert [each.seed for each in found] == [3, 4]
    assert [each.failures for each in found] == [["the process ended with status 1"]] * 2


def test_what_a_skipped_step_changed_is_said() -> None:
    trial = draw("torch", 0)._replace(steps=3, overflows=((1, 0, 0),))
    steps = [{"parameters": digest, "scale": digest} for digest in ("a", "b", "c")]
    assert untouched(trial, [steps], ["parameters"]) == ["replica 0: the skipped step 1 changed parameters"]


def test_the_table_counts() -> None:
    each = [Outcome(seed, "ddp", 2, 8, 1, ["it hangs"] * (seed == 1), 1e-7, 0.1) for seed in range(3)]
    assert soak.table({"torch": each}).splitlines()[1].split() == ["torch,", "ddp", "2", "3", "24", "3", "1", "1.0e-07"]
    assert json.loads(json.dumps(each[0]._asdict()))["world"] == 2

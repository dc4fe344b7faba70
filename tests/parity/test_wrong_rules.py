"""The wrong rules of `tests.parity.faults.rules` change what a step does in each framework: one that patches nothing
plants no fault, and would count as one that is never found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RULES = ("sum of micro-batches", "clipped before unscaling", "not unscaled", "never skipped", "no bias correction")
PROGRAM = """
import json, sys
import numpy as np
import polyamp
from polyamp.conformance.problems import batch, flat_weights, recipe, train
from polyamp.contract import registry
from tests.parity.faults.rules import RULES, stepping

backend, library = sys.argv[1:]
harness = registry.get(backend).testing()
SETTINGS = {
    "sum of micro-batches": {"accumulate_steps": 2},
    "clipped before unscaling": {"clip_norm": 0.5},
    "no bias correction": {"optimizer": polyamp.adamw(0.1)},
}

def weights(rule, planted):
    if backend == "jax":
        import jax
        jax.clear_caches()
    made = recipe(scaler=polyamp.LossScaler(init_scale=16.0), **SETTINGS.get(rule, {}))
    batches = [batch(0), batch(1, gain=np.inf if rule == "never skipped" else 1.0)]
    with stepping(planted, library):
        state, _ = train(harness, made, batches)
        return flat_weights(harness, state)

found = {}
for rule in RULES:
    right = weights(rule, "")
    assert np.isfinite(right).all(), rule
    assert rule != next(iter(RULES)) or np.array_equal(right, weights(rule, ""))
    wrong = weights(rule, rule)
    found[rule] = not np.allclose(right, wrong, rtol=1e-3, atol=1e-5)
print(json.dumps(found))
"""


@pytest.mark.parametrize(("backend", "library"), [("torch", "torch"), ("tensorflow", "keras"), ("jax", "nnx")])
def test_each_wrong_rule_trains_other_weights(backend: str, library: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, backend, library],
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == dict.fromkeys(RULES, True)

"""Rules S8, S12 and S13 with the framework's own optimizers: they train as the specs do, over windows and skips."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.conformance.problems import (
    batch,
    changed_arrays,
    flat_weights,
    layers,
    loss_fn,
    recipe,
    relative_difference,
    to_float,
)
from polyamp.contract.backend import Backend
from polyamp.contract.harness import Harness
from polyamp.errors import UnsupportedError

SPECS: dict[str, Any] = {
    "adamw": polyamp.adamw(0.05, weight_decay=0.1),
    "halving": polyamp.sgd(polyamp.schedules.step(0.05, every=1, factor=0.5)),
}


@pytest.mark.parametrize("kind", SPECS)
def test_s12_a_native_optimizer_trains_as_its_spec_does(backend: Backend, harness: Harness, kind: str) -> None:
    """Two micro-batches a step; the second step overflows, and moves neither moments nor count nor schedule."""
    ends, flags = [], []
    for native in (True, False):
        model = harness.mlp(layers())
        try:
            optimizer = harness.native_optimizer(model, 0.05, kind) if native else SPECS[kind]
            made = recipe(optimizer=optimizer, scaler=polyamp.LossScaler(init_scale=64.0), accumulate_steps=2)
            state = polyamp.init(model, made)
        except UnsupportedError:
            return  # the framework has none
        step = polyamp.train_step(loss_fn, made)
        for seed, gain in enumerate((1.0, np.inf, 1.0, 1.0)):
            before = backend.export_state(state)
            state, result = step(state, batch(seed, gain=gain))
            flags.append((to_float(backend, result.scale), to_float(backend, result.step)))
            if gain != 1.0:
                assert changed_arrays(before, backend.export_state(state)) == []
        ends.append(flat_weights(harness, state))
    assert flags[:4] == flags[4:] == [(64.0, 1), (32.0, 1), (32.0, 2), (32.0, 3)]
    assert relative_difference(*ends) < 2e-4

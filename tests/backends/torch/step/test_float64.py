"""S1 where parameters are float64, in compiled steps."""

from __future__ import annotations

from typing import Any

import pytest

import polyamp
from polyamp import schedules
from polyamp.conformance.problems import recipe
from polyamp.conformance.test_float64 import GROUPS, distance_from_formulas
from polyamp.contract import registry

TRACED: dict[str, Any] = {"backend": "aot_eager"}


@pytest.mark.parametrize(
    "optimizer",
    [
        polyamp.adamw(0.03, weight_decay=0.3, groups=GROUPS),
        polyamp.adagrad(schedules.piecewise((0.03, 0.07), (9,)), lr_decay=0.07),
    ],
    ids=lambda optimizer: optimizer.tag,
)
def test_s01_float64_compiled_steps(optimizer: Any) -> None:
    backend = registry.get("torch")
    made = recipe(
        polyamp.Policy("float64"),
        optimizer=optimizer,
        scaler=polyamp.LossScaler(init_scale=1000.0),
        clip_norm=0.07,
    )
    assert distance_from_formulas(backend, backend.testing(), made, compile=TRACED) < 1e-14

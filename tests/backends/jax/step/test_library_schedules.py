"""`schedules.like` gives the rates of optax's own schedules, update for update (S13)."""

from __future__ import annotations

import inspect
from typing import Any

import jax.numpy as jnp
import optax
import pytest

from polyamp import schedules
from polyamp.schedules.library_schedules import LIBRARY_SCHEDULES
from polyamp_jax.arrays import XP

CASES: list[tuple[str, dict[str, Any]]] = [
    ("constant_schedule", {"value": 0.3}),
    ("linear_schedule", {"init_value": 0.3, "end_value": 0.1, "transition_steps": 9}),
    ("linear_schedule", {"init_value": 0.1, "end_value": 0.3, "transition_steps": 9, "transition_begin": 4}),
    ("polynomial_schedule", {"init_value": 0.3, "end_value": 0.1, "power": 2, "transition_steps": 9}),
    ("exponential_decay", {"init_value": 0.3, "transition_steps": 5, "decay_rate": 0.5, "transition_begin": 3}),
    ("exponential_decay", {"init_value": 0.3, "transition_steps": 5, "decay_rate": 0.5, "staircase": True}),
    ("cosine_decay_schedule", {"init_value": 0.3, "decay_steps": 12, "alpha": 0.1}),
    ("warmup_constant_schedule", {"init_value": 0.1, "peak_value": 0.3, "warmup_steps": 5}),
    ("warmup_cosine_decay_schedule", {"init_value": 0.1, "peak_value": 0.3, "warmup_steps": 5, "decay_steps": 18,
     "end_value": 0.05}),
    ("piecewise_constant_schedule", {"init_value": 0.3, "boundaries_and_scales": {4: 0.5, 9: 0.1}}),
    ("cosine_onecycle_schedule", {"transition_steps": 17, "peak_value": 0.3}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_s13_the_rates_are_optax(name: str, arguments: dict[str, Any]) -> None:
    schedule, theirs = schedules.like(f"optax.{name}", **arguments), getattr(optax, name)(**arguments)
    for count in range(25):
        expected = pytest.approx(float(theirs(count)), rel=2e-6, abs=1e-8)
        assert schedule(count) == expected
        on_device = schedule(jnp.int32(count), XP)
        assert on_device.dtype == jnp.float32
        assert float(on_device) == pytest.approx(schedule(count), rel=2e-5, abs=1e-7)


def test_every_schedule_of_optax_is_compared_with_its_arguments_and_defaults() -> None:
    names = {name.removeprefix("optax.") for name in LIBRARY_SCHEDULES if name.startswith("optax.")}
    assert {name for name, _ in CASES} == names
    for name in names:
        theirs = inspect.signature(getattr(optax, name)).parameters
        own = inspect.signature(LIBRARY_SCHEDULES[f"optax.{name}"]).parameters
        assert {key: value.default for key, value in own.items()} == {
            key: value.default for key, value in theirs.items()
        }, name

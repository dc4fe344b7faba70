"""`polyamp.float8_plan` in JAX: which products it finds, and that its overrides act."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

import polyamp
from polyamp import Float8, Policy, UnsupportedError
from polyamp.doctor.fastest_times import TimingLimits
from polyamp.doctor.float8_probe import ProductShape
from polyamp.doctor.float8_times import ProductTime, measure_product
from polyamp_jax.backend import BACKEND

POLICY = Policy("mixed_float8", float8=Float8(emulate=True))
X = jnp.ones((2, 4, 32))


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.mix = nnx.Param(jnp.ones((48, 32)))
        self.first, self.narrow = nnx.Linear(32, 48, rngs=rngs), nnx.Linear(48, 10, rngs=rngs)
        self.head = nnx.Linear(48, 16, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = jnp.tanh(self.first(x))
        x = jnp.tanh(self.first(jnp.einsum("oi,bti->bto", self.mix[...].T, x)))  # the parameter is on the left
        return self.head(x).sum() + self.narrow(x).mean()


@pytest.fixture
def no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(probe: Any, shape: ProductShape, *_: Any, **__: Any) -> ProductTime:
        return ProductTime(**shape._asdict(), bfloat16_ms=1.0, float8_ms=2.0)

    monkeypatch.setattr("polyamp.doctor.float8_plan.measure_product", measure)


@pytest.mark.parametrize("as_loss", [True, False])
def test_the_products_are_those_that_explain_lists(no_times: None, as_loss: bool) -> None:
    given = (lambda model, x: model(x), POLICY, Net(), X) if as_loss else (Net(), POLICY, X)
    found = polyamp.float8_plan(*given)
    rows = [(row.module, row.shape, row.count) for row in found.layers]
    assert rows == [("first", ProductShape(8, 32, 48), 2), ("", ProductShape(8, 48, 32), 1)]
    assert (found.backend, found.device, found.emulated, found.compiled) == ("jax", "cpu:0", True, True)
    listed = polyamp.explain(*given).operations
    products = {row.module: row.count for row in listed if (row.rule, row.direction) == ("float8", "forward")}
    assert products == {"first": 2, "": 1}


def test_overrides_decide_what_is_found(no_times: None) -> None:
    policy = POLICY.replace(overrides={"*": "bfloat16", "head": "float8"})
    found = polyamp.float8_plan(Net(), policy, X)
    assert [(row.module, row.shape) for row in found.layers] == [("head", ProductShape(8, 48, 16))]


def test_a_linen_model_of_abstract_arrays(no_times: None) -> None:
    model = linen.Dense(64)
    given = model, model.init(jax.random.key(0), X)
    found = polyamp.float8_plan(given, POLICY, jax.ShapeDtypeStruct((128, 32), jnp.float32))
    assert [(row.shape, row.count) for row in found.layers] == [(ProductShape(128, 32, 64), 1)]


def test_a_shape_is_measured() -> None:
    probe = BACKEND.float8_probe  # type: ignore[attr-defined]  # an optional protocol
    assert probe.multiplies_float8("cpu:0") is False
    time = measure_product(
        probe.programs,
        ProductShape(32, 64, 16),
        Float8(emulate=True),
        "cpu:0",
        compiled=False,
        limits=TimingLimits(0.0, 0.0, 1, 1),
    )
    assert time.shape == (32, 64, 16)
    assert 0.0 < time.bfloat16_ms < 1000.0
    assert 0.0 < time.float8_ms < 1000.0


def test_a_cpu_is_refused_as_in_training() -> None:
    with pytest.raises(UnsupportedError, match=r"^float8: this device \('cpu'\) multiplies no 8-bit floats; "):
        polyamp.float8_plan(Net(), "mixed_float8", X)

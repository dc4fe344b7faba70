"""`polyamp.float8_plan` of a Keras model on each of Keras's backends: its products, their programs, and that the paths
of its layers are those of overrides."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import polyamp
import polyamp_keras
from polyamp import Float8, Policy, UnsupportedError
from polyamp.contract import registry
from polyamp.doctor.fastest_times import TimingLimits
from polyamp.doctor.float8_measurement import measure_float8
from polyamp.doctor.float8_plan_data import decide_layers
from polyamp.doctor.float8_probe import ProductShape
from polyamp.doctor.float8_times import ProductTime, measure_product

POLICY = Policy("mixed_float8", float8=Float8(emulate=True))
X = np.random.default_rng(0).normal(size=(2, 4, 32)).astype("float32")


def network() -> Any:
    """Layers that are called twice, that have a name of Keras's making, whose sizes are refused, and a head."""
    first = keras.layers.Dense(48)
    return keras.Sequential(
        [
            keras.Input((4, 32)),
            first,
            keras.layers.Dense(32, name="back"),
            first,
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.EinsumDense("abc,cde->abde", (4, 4, 16), name="tokens"),
            keras.layers.Flatten(),
            keras.layers.Dense(10, name="odd"),
            keras.layers.Dense(16, name="head"),
        ]
    )


PRODUCTS = [
    ("dense", ProductShape(8, 32, 48), 2),
    ("back", ProductShape(8, 48, 32), 1),
    ("tokens", ProductShape(8, 48, 64), 1),
]


@pytest.fixture
def no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(programs: Any, shape: ProductShape, *_: Any, **__: Any) -> ProductTime:
        return ProductTime(**shape._asdict(), bfloat16_ms=1.0, float8_ms=2.0)

    monkeypatch.setattr("polyamp.doctor.float8_plan.measure_product", measure)


@pytest.mark.usefixtures("no_times")
def test_the_products_are_those_of_the_layers_that_the_policy_has_in_8_bits(backend: str) -> None:
    keras.layers.Dense(1)  # so that the name of the network's first layer has a number
    model = network()
    before = [np.asarray(keras.ops.convert_to_numpy(each)) for each in model.variables]
    for given in ((model, POLICY, X), (lambda model, x: keras.ops.mean(model(x)), POLICY, model, X)):
        found = polyamp.float8_plan(*given)
        assert [(row.module, row.shape, row.count) for row in found.layers] == PRODUCTS
        assert (found.backend, found.emulated, found.compiled) == (backend, True, backend != "torch")
        assert found.device.lower() in ("cpu", "cpu:0")
    with polyamp_keras.apply_policy(model, POLICY, heads=False) as applied:
        narrow = [path for path, (_, why) in applied.choices.items() if why == "float8"]
    assert narrow == [model.layers[0].name, "back", "tokens"]
    for array, variable in zip(before, model.variables, strict=True):  # statistics and seeds too
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), array)
    assert "call" not in vars(model.layers[0])


@pytest.mark.usefixtures("no_times")
def test_the_paths_are_those_of_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    """With decisions as of products that are not emulated, which Keras has none of."""

    def decide(products: Any, times: Any, *, emulated: bool, least_speed: float) -> Any:
        return decide_layers(products, times, emulated=False, least_speed=least_speed)

    monkeypatch.setattr("polyamp.doctor.float8_plan.decide_layers", decide)
    inputs = keras.Input((4, 32))
    attention = keras.layers.MultiHeadAttention(2, 16)
    model = keras.Model(inputs, keras.Sequential([keras.layers.Dense(16)])(attention(inputs, inputs)))
    found = polyamp.float8_plan(model, POLICY, X)
    assert [row.module.rpartition("/")[2] for row in found.layers] == [
        *("query", "key", "value", "attention_output", "dense")
    ]
    assert found.overrides == {row.module: "bfloat16" for row in found.layers}
    for module in found.overrides:
        again = polyamp.float8_plan(model, POLICY.replace(overrides={module: "bfloat16"}), X)
        assert [row.module for row in again.layers] == [row.module for row in found.layers if row.module != module]
    assert polyamp.float8_plan(model, POLICY.replace(overrides=found.overrides), X).layers == []


def test_a_shape_is_measured(backend: str) -> None:
    limits = TimingLimits(0.0, 0.0, 1, 1)
    chosen: Any = registry.get(backend)
    device = chosen.capability_probe.devices()[-1]
    programs = chosen.float8_probe.products(network(), POLICY, X).programs
    settings = Float8(emulate=True, scaling="block32")
    time = measure_product(programs, ProductShape(20, 64, 32), settings, device.name, compiled=False, limits=limits)
    assert 0.0 < time.bfloat16_ms < 1000.0
    assert 0.0 < time.float8_ms < 1000.0
    measured = measure_float8(chosen.float8_probe, device, shapes=[ProductShape(32, 64, 16)], limits=limits)
    assert (measured.verdict, measured.problem, len(measured.times)) == ("emulated", None, 1)


def test_what_is_refused(backend: str) -> None:
    with pytest.raises(UnsupportedError, match=r"^float8: Keras multiplies no 8-bit floats"):
        polyamp.float8_plan(network(), "mixed_float8", X)
    with pytest.raises(UnsupportedError, match=r"^float8_plan of Keras models takes a loss function, a policy, a mod"):
        polyamp.float8_plan(lambda *given: None, POLICY, network(), X, X)
    with pytest.raises(polyamp.ModelError, match=r"^float8_plan takes a built model, whose layers all exist\."):
        polyamp.float8_plan(keras.Sequential([keras.layers.Dense(16)]), POLICY, X)
    if backend == "torch":
        with pytest.raises(UnsupportedError, match=r"compiler does not trace the layers of Keras.*Leave compiled= out"):
            polyamp.float8_plan(network(), POLICY, X, compiled=True)

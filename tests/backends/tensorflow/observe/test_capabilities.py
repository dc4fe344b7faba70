"""The doctor's operations in TensorFlow on the CPU, and the traps of this version, reproduced."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from polyamp_tensorflow.observe.capabilities import PROBE
from polyamp_tensorflow.observe.known_traps import TRAPS
from tests.core.doctor.backend_checks import check_operations, measure_small
from tests.fuzz.build_tensorflow import cuts_bfloat16_off

CPU = PROBE.devices()[-1]


def test_every_dtype_is_measured() -> None:
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    found = measure_small(PROBE, CPU)
    error = 3.3e-3 if cuts_bfloat16_off() else 1.63e-3  # of a result that is cut off, of one that is rounded
    assert found.dtypes["bfloat16"].accumulation_error == pytest.approx(error, rel=0.1)
    assert found.dtypes["float8_e5m2"].verdict == "fails"
    assert "float8_e5m2 is not in the list of allowed values" in found.dtypes["float8_e5m2"].reason
    assert tf.config.experimental.tensor_float_32_execution_enabled() is before
    assert CPU == ("CPU:0", "cpu", "CPU:0")


def test_inputs_have_the_dtype() -> None:
    check_operations(PROBE, CPU)


def test_the_traps_are_those_of_this_version() -> None:
    assert len([trap for trap in TRAPS if trap.holds_for(tf.__version__, "cpu")]) == 3


@pytest.mark.parametrize(("gradient", "scale", "weight"), [(np.inf, 0.0, -np.inf), (1.0, np.inf, 0.0)])
def test_the_scale_of_keras_has_no_limits(gradient: float, scale: float, weight: float) -> None:
    variable = keras.Variable(np.zeros(1, np.float32))
    optimizer = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(1.0), dynamic_growth_steps=1)
    optimizer.build([variable])
    for _ in range(170):
        optimizer.apply([tf.constant([gradient])], [variable])
    assert float(optimizer.dynamic_scale) == scale
    variable.assign([0.0])
    optimizer.apply([tf.constant([1.0])], [variable])
    np.testing.assert_array_equal(variable.numpy(), [weight])


def test_float16_layers_alone_are_not_scaled() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, dtype="mixed_float16")])
    model.compile("sgd", "mse")
    assert type(model.optimizer) is keras.optimizers.SGD


def test_bfloat16_products_are_cut_off_or_rounded_and_by_xla_rounded() -> None:
    rng = np.random.default_rng(0)
    x, w = (tf.cast(rng.normal(size=shape).astype(np.float32), tf.bfloat16) for shape in ((64, 8), (8, 64)))
    exact = np.asarray(tf.cast(x, tf.float64)) @ np.asarray(tf.cast(w, tf.float64))
    nearest = exact.astype(np.float32).astype(tf.bfloat16.as_numpy_dtype).astype(np.float64)
    own = np.asarray(tf.cast(tf.matmul(x, w), tf.float64))
    if cuts_bfloat16_off():
        assert (np.abs(own) <= np.abs(exact)).all()
        assert np.mean(own != nearest) > 0.4
        assert np.abs(own).sum() / np.abs(exact).sum() - 1.0 == pytest.approx(-2.8e-3, rel=0.1)
    else:
        np.testing.assert_array_equal(own, nearest)
    compiled = tf.function(tf.matmul, jit_compile=True)(x, w)
    np.testing.assert_array_equal(np.asarray(tf.cast(compiled, tf.float64)), nearest)
    assert abs(np.abs(nearest).sum() / np.abs(exact).sum() - 1.0) < 2e-4

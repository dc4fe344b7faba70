"""Logical CPUs, which TensorFlow takes only before it starts, and one strategy over two of them, one over four; what
importing polyamp_tensorflow leaves to the user's `floatx`."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

import polyamp_tensorflow

_CPU = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(_CPU, [tf.config.LogicalDeviceConfiguration()] * 6)

assert polyamp_tensorflow.BACKEND is not None, "imported before the first layer of this process is made"
keras.config.set_floatx("float64")
_DTYPE_AFTER_IMPORT = str(keras.layers.Dense(1, name="after_import").compute_dtype)
keras.config.set_floatx("float32")
keras.config.set_dtype_policy("float32")


@pytest.fixture
def dtype_after_import() -> str:
    """The compute dtype of this process's first layer, made under floatx="float64" after polyamp_tensorflow came."""
    return _DTYPE_AFTER_IMPORT


@pytest.fixture(scope="session")
def two_cpus() -> Any:
    """Two replicas. One object for all tests: two MirroredStrategy objects over the same devices hand out the same
    collective keys, and TensorFlow 2.21 then mixes up their reductions."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


class _KeysOfItsOwn(tf.distribute.MirroredStrategy):
    _collective_key_base = 100_000  # where TensorFlow's own tests have several strategies in one process


@pytest.fixture(scope="session")
def four_cpus() -> Any:
    """Four replicas, on devices and with collective keys of their own, for the same reason."""
    return _KeysOfItsOwn([f"CPU:{number}" for number in range(2, 6)])

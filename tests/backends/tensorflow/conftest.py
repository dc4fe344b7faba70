"""Two logical CPUs, which TensorFlow takes only before it starts, and the one strategy over them."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

_CPU = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(_CPU, [tf.config.LogicalDeviceConfiguration()] * 2)


@pytest.fixture(scope="session")
def two_cpus() -> Any:
    """Two replicas. One object for all tests: two MirroredStrategy objects over the same devices hand out the same
    collective keys, and TensorFlow 2.21 then mixes up their reductions."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

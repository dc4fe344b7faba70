"""`TensorFlowFloat8Probe`: products in 8 bits of a Keras model, and their programs for the doctor (`Float8Probe`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import tensorflow as tf

from polyamp.doctor.float8_probe import Float8Probe, ModelProducts, ProductPrograms, ProductShape
from polyamp.recipe.float8 import Float8
from polyamp.recipe.policy import Policy
from polyamp_keras.observe.layer_products import layer_products, product_functions, read_pass
from polyamp_tensorflow.arrays import device_name, to_tensors
from polyamp_tensorflow.observe.capture import run_eagerly


class TensorFlowFloat8Probe:
    """`Float8Probe` for TensorFlow, whose steps are graphs and whose products in 8 bits are emulated."""

    always_compiles = True

    def multiplies_float8(self, device: str) -> bool:
        return False

    def products(self, target: Any, policy: Policy, *inputs: Any) -> ModelProducts:
        given = read_pass("float8_plan", target, inputs)
        with run_eagerly():
            found = layer_products(given._replace(batch=to_tensors(given.batch, policy.param)), policy)
        devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
        return ModelProducts(device_name(devices[0].name), found, self.programs)

    def programs(self, shape: ProductShape, float8: Float8, device: str, *, compiled: bool) -> ProductPrograms:
        generator = np.random.default_rng(0)

        def random(rows: int, columns: int, dtype: Any) -> Any:
            return tf.cast(generator.standard_normal((rows, columns), np.float32), dtype)

        with tf.device(device):
            x = random(shape.rows, shape.inputs, tf.bfloat16)
            w = random(shape.inputs, shape.outputs, tf.float32)
            cotangent = random(shape.rows, shape.outputs, tf.bfloat16)
        return ProductPrograms(*(_repeat(function, x, w, cotangent, device) for function in product_functions(float8)))


def _repeat(function: Callable[[Any, Any], Any], x: Any, w: Any, cotangent: Any, device: str) -> Callable[[int], None]:
    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow is untyped
    def products(x: Any, w: Any, cotangent: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch((x, w))
            out = function(x, w)
        return out, tape.gradient(out, (x, w), cotangent)

    def run(count: int) -> None:
        with tf.device(device):
            for _ in range(count):
                products(x, w, cotangent)
            tf.test.experimental.sync_devices()

    return run


FLOAT8_PROBE: Final[Float8Probe] = TensorFlowFloat8Probe()

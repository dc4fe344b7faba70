"""`JaxFloat8Probe`: products in 8 bits of a JAX model, and their programs for the doctor (`Float8Probe`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from polyamp import backend_lookup
from polyamp.doctor.float8_probe import Float8Probe, ModelProduct, ModelProducts, ProductPrograms, ProductShape
from polyamp.recipe.float8 import Float8
from polyamp.recipe.policy import Policy
from polyamp_jax.arrays import device_name, multiplies_float8, prepare_batch
from polyamp_jax.observe.capabilities import find_device
from polyamp_jax.observe.jax_only.casting_reports import record_operations
from polyamp_jax.precision.interpreter.float8_products import Product, multiply
from polyamp_jax.precision.policy_module import follows_layer_policy


class JaxFloat8Probe:
    """`Float8Probe` for JAX, whose programs XLA compiles."""

    always_compiles = True

    def multiplies_float8(self, device: str) -> bool:
        return multiplies_float8(find_device(device))

    def products(self, target: Any, policy: Policy, *inputs: Any) -> ModelProducts:
        device = device_name(jax.devices()[0])
        if any(map(follows_layer_policy, (target, *inputs))):
            from polyamp_keras.observe import layer_products as layers  # imports Keras

            given = layers.read_pass("float8_plan", target, inputs)
            given = given._replace(batch=prepare_batch(given.batch, policy.plan(), compiled=False))
            return ModelProducts(device, layers.layer_products(given, policy), _keras_programs)
        recorder = record_operations(backend_lookup.get("jax"), target, policy, inputs)
        found = [ModelProduct(module, ProductShape(*sizes), n) for (module, sizes), n in recorder.products.items()]
        return ModelProducts(device, found, self.programs)

    def programs(self, shape: ProductShape, float8: Float8, device: str, *, compiled: bool) -> ProductPrograms:
        product = Product(1, ((0,), (1,)), ((1,), (0,)), float8)
        functions = (
            lambda x, w: jax.lax.dot(x, w.astype(x.dtype)),
            lambda x, w: multiply(product, (x, w.astype(x.dtype))),
        )
        return _programs(functions, shape, device)


def _keras_programs(shape: ProductShape, float8: Float8, device: str, *, compiled: bool) -> ProductPrograms:
    """Return the programs of a product of a Keras layer (`MakePrograms`)."""
    from polyamp_keras.observe.layer_products import product_functions  # imports Keras

    return _programs(product_functions(float8), shape, device)


def _programs(functions: Iterable[Callable[[Any, Any], Any]], shape: ProductShape, device: str) -> ProductPrograms:
    """Return the programs of two functions of an activation and a parameter."""
    generator = np.random.default_rng(0)

    def random(rows: int, columns: int, dtype: Any) -> Any:
        array = generator.standard_normal((rows, columns), np.float32)
        return jax.device_put(array.astype(dtype), find_device(device))

    x = random(shape.rows, shape.inputs, jnp.bfloat16)
    w = random(shape.inputs, shape.outputs, jnp.float32)
    cotangent = random(shape.rows, shape.outputs, jnp.bfloat16)
    return ProductPrograms(*(_repeat(function, x, w, cotangent) for function in functions))


def _repeat(function: Callable[[Any, Any], Any], x: Any, w: Any, cotangent: Any) -> Callable[[int], None]:
    @jax.jit
    def products(x: Any, w: Any, cotangent: Any) -> Any:
        out, gradients = jax.vjp(function, x, w)
        return out, gradients(cotangent)

    def run(count: int) -> None:
        for _ in range(count):
            last = products(x, w, cotangent)
        for result in jax.tree.leaves(last):
            result.block_until_ready()

    return run


FLOAT8_PROBE: Final[Float8Probe] = JaxFloat8Probe()

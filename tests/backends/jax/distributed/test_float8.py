"""Products in 8 bits over shards (S36): scales of the whole tensor, row or block where the compiler shards it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import polyamp
from polyamp.monitor.records import PRODUCT_OPERANDS
from polyamp_jax.precision.interpreter.float8_products import quantizer
from tests.backends.jax.distributed.meshes import mesh
from tests.fixtures import float8_values


def policy(scaling: str) -> polyamp.Policy:
    return polyamp.Policy("mixed_float8", float8=polyamp.Float8(scaling=scaling, emulate=True))


class Net(nnx.Module):
    def __init__(self) -> None:
        self.first, self.second = nnx.Linear(64, 32, rngs=nnx.Rngs(0)), nnx.Linear(32, 32, rngs=nnx.Rngs(1))

    def __call__(self, x: Any) -> Any:
        return self.second(jax.nn.relu(self.first(x)))


def uneven(rows: int) -> Any:
    """Rows of other sizes, and a number far above the others in the first row and in the first column of a device."""
    x = np.random.default_rng(0).normal(size=(rows, 64)).astype(np.float32)
    x *= np.exp2(np.linspace(-20, 0, rows, dtype=np.float32).round())[:, None]
    x[3] *= 100.0  # on one device alone
    return x


@pytest.mark.parametrize("scaling", ["tensor", "row", "block32"])
@pytest.mark.parametrize("axis", [0, 1])
def test_s36_shards_have_the_scales_of_the_whole_batch(scaling: str, axis: int) -> None:
    """With axis 1 the axis over which the product sums is sharded, of which a device has half a block."""
    x, devices = uneven(16), mesh()
    spread = jax.device_put(jnp.asarray(x), NamedSharding(devices, P(*[None] * axis, devices.axis_names[0])))
    assert len(spread.sharding.device_set) > 1
    run = jax.jit(policy(scaling).autocast(Net()))
    np.testing.assert_allclose(
        np.asarray(run(spread)), np.asarray(run(jnp.asarray(x))), rtol=0, atol=0 if axis == 0 else 2.0**-6
    )


@pytest.mark.parametrize("scaling", ["tensor", "row", "block32"])
def test_s36_a_parameter_whose_features_are_sharded_has_the_scales_of_the_whole_one(scaling: str) -> None:
    """Tensor parallel, the largest number on one device alone: scales and 8-bit numbers are the same bit for bit along
    either axis, and so is the product of a parameter whose contracted axis is whole."""
    w, devices = jnp.asarray(uneven(64).T.reshape(64, 64)), mesh()
    columns = jax.device_put(w, NamedSharding(devices, P(None, devices.axis_names[0])))
    run = jax.jit(quantizer.quantize, static_argnums=(1, 2, 3))
    for axis in (0, 1):
        got, want = (run(each, "float8_e4m3fn", scaling, axis) for each in (columns, w))
        np.testing.assert_array_equal(np.asarray(got.exponent), np.asarray(want.exponent))
        np.testing.assert_array_equal(float8_values.bits(got.numbers), float8_values.bits(want.numbers))
    x = jnp.asarray(uneven(16))

    @jax.jit
    def product(w: Any, x: Any) -> Any:
        layer = nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))
        layer.kernel[...] = w
        return policy(scaling).autocast(layer)(x)

    np.testing.assert_array_equal(np.asarray(product(columns, x)), np.asarray(product(w, x)))


@pytest.mark.parametrize("scaling", ["tensor", "row", "block32"])
def test_s36_gradients_over_shards_have_the_scales_of_the_whole_batch(scaling: str) -> None:
    """The parameter's gradient sums over the rows, which the devices share: 64 rows are two blocks on four devices."""
    x, devices = uneven(64), mesh()
    recipe = polyamp.Recipe(policy=policy(scaling), optimizer=polyamp.sgd(1.0))
    state = polyamp.init(Net(), recipe)
    run = jax.jit(polyamp.value_and_grad(lambda model, x: jnp.square(model(x)).mean()))
    spread = jax.device_put(jnp.asarray(x), NamedSharding(devices, P(devices.axis_names[0])))
    found = [jax.tree.leaves(run(state, each)[1].values) for each in (spread, jnp.asarray(x))]
    for got, want in zip(*found, strict=True):
        size = np.abs(np.asarray(want)).max()
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=2.0**-7 * size)


def test_s36_a_monitor_on_several_devices_has_the_figures_of_one() -> None:
    x = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    devices = mesh()
    spread = jax.device_put(jnp.asarray(x), NamedSharding(devices, P(devices.axis_names[0])))
    recipe = polyamp.Recipe(policy=policy("tensor"), optimizer=polyamp.sgd(0.1))
    found = []
    for given in (spread, jnp.asarray(x)):
        monitor = polyamp.Monitor(every=1, gradients=False, updates=False, products=True)
        step = polyamp.train_step(lambda model, x: jnp.mean(jnp.square(model(x))), recipe, monitor=monitor)
        step(polyamp.init(Net(), recipe), given)
        found.append(monitor.records[0].modules)
    for one, other in zip(*found, strict=True):
        assert one.module == other.module
        assert one.products is not None
        assert other.products is not None
        for name in PRODUCT_OPERANDS:
            own, wanted = getattr(one.products, name), getattr(other.products, name)
            assert own.elements == wanted.elements
            assert abs(own.sqnr - wanted.sqnr) < 0.05

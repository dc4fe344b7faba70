"""Products in 8 bits over shards (S36): one scale for the whole tensor where the compiler shards it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import polyamp
from polyamp.monitor.records import PRODUCT_OPERANDS
from tests.backends.jax.distributed.meshes import mesh

POLICY = polyamp.Policy("mixed_float8", float8=polyamp.Float8(emulate=True))


class Net(nnx.Module):
    def __init__(self) -> None:
        self.first, self.second = nnx.Linear(16, 32, rngs=nnx.Rngs(0)), nnx.Linear(32, 16, rngs=nnx.Rngs(1))

    def __call__(self, x: Any) -> Any:
        return self.second(jax.nn.relu(self.first(x)))


def test_s36_rows_over_devices_have_the_scale_of_the_whole_batch() -> None:
    x = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    x[3] *= 100.0  # on one device alone
    devices = mesh()
    spread = jax.device_put(jnp.asarray(x), NamedSharding(devices, P(devices.axis_names[0])))
    assert len(spread.sharding.device_set) > 1
    run = jax.jit(POLICY.autocast(Net()))
    np.testing.assert_array_equal(np.asarray(run(spread)), np.asarray(run(jnp.asarray(x))))


def test_s36_a_monitor_on_several_devices_has_the_figures_of_one() -> None:
    x = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    devices = mesh()
    spread = jax.device_put(jnp.asarray(x), NamedSharding(devices, P(devices.axis_names[0])))
    recipe = polyamp.Recipe(policy=POLICY, optimizer=polyamp.sgd(0.1))
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

"""A monitor on four devices has the figures of one: inside `shard_map` and `pmap`, in a scan, and on a mesh (S35)."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import polyamp
from polyamp.monitor.records import MonitorRecord
from tests.backends.jax.distributed.meshes import both_sharded, loss_fn, mesh, put, rows_sharded, whole_batch
from tests.backends.jax.distributed.test_replicas import NAMED, WAYS, over_replicas

RECIPE = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(1e-2, eps=1e-3), clip_norm=0.5)


def recorded(model: Any, every: int = 1, steps: int = 4) -> list[MonitorRecord]:
    """The records of one device."""
    monitor = polyamp.Monitor(every=every, weights=True, activations=True)
    state, step = polyamp.init(model, RECIPE), polyamp.train_step(loss_fn, RECIPE, monitor=monitor)
    for number in range(steps):
        state, _ = step(state, whole_batch(number))
    return monitor.records


def assert_alike(found: list[MonitorRecord], expected: list[MonitorRecord]) -> None:
    """All figures agree; a gradient may round over a power of two."""
    assert [each.call for each in found] == [each.call for each in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
        assert one.modules[-1].activations is not None
        assert [each.module for each in one.modules] == [each.module for each in other.modules]
        for own, wanted in zip(one.modules, other.modules, strict=True):
            if own.activations is not None:
                assert wanted.activations is not None
                assert own.activations.elements == wanted.activations.elements
                assert own.activations.rms == pytest.approx(wanted.activations.rms, rel=1e-5)
                assert own.activations.largest == pytest.approx(wanted.activations.largest, rel=1e-5)
            if own.gradients is None:
                assert own.module == ""
                continue
            assert wanted.gradients is not None
            assert own.weights is not None
            assert wanted.weights is not None
            assert own.gradients.elements == wanted.gradients.elements
            assert own.gradients.norm == pytest.approx(wanted.gradients.norm, rel=1e-5)
            assert sum(own.gradients.exponents) == sum(wanted.gradients.exponents)
            assert own.weights.norm == pytest.approx(wanted.weights.norm, rel=1e-5)
            assert own.weights.elements == wanted.weights.elements
            assert own.update_ratio == pytest.approx(wanted.update_ratio, rel=1e-3)


@pytest.mark.parametrize("way", WAYS)
def test_s35_replicas_have_the_figures_of_one(way: str, make_kind: Any) -> None:
    made = make_kind("function")
    monitor = polyamp.Monitor(every=2, weights=True, activations=True)
    state = polyamp.init(made.model, RECIPE)
    step = over_replicas(way, polyamp.train_step(loss_fn, RECIPE, monitor=monitor, **NAMED[way]))
    for number in range(4):
        state, result = step(state, whole_batch(number))
        monitor.read(state, result)
    assert_alike(monitor.records, recorded(made.model, every=2))


@pytest.mark.parametrize("spec", [rows_sharded, both_sharded])
def test_s35_sharded_arrays_have_the_figures_of_one_device(spec: Any, make_kind: Any) -> None:
    made = make_kind("function")
    on = mesh((2, 2), ("data", "model"))
    monitor = polyamp.Monitor(every=1, weights=True, activations=True)
    state = polyamp.init(put(made.model, on, spec), RECIPE)
    step = polyamp.train_step(loss_fn, RECIPE, monitor=monitor)
    for number in range(3):
        state, _ = step(state, jax.device_put(whole_batch(number), NamedSharding(on, P("data"))))
    assert_alike(monitor.records, recorded(made.model, steps=3))


def test_s35_a_scan_over_steps_and_a_switch_compile_nothing_again(make_kind: Any) -> None:
    """The figures of a scan are those of single calls; a scan of a monitor that is off has none."""
    made = make_kind("function")
    monitor = polyamp.Monitor(every=2, weights=True, activations=True)
    step = polyamp.train_step(loss_fn, RECIPE, monitor=monitor, compile=False)
    batch = jax.tree.map(lambda *rows: jax.numpy.stack(rows), *[whole_batch(number) for number in range(6)])
    state, results = jax.jit(lambda state, batch: jax.lax.scan(step, state, batch))(
        polyamp.init(made.model, RECIPE), batch
    )
    assert_alike(monitor.read(state, results), recorded(made.model, every=2, steps=6))
    traces = []

    def counted(model: Any, batch: Any) -> Any:
        traces.append(1)
        return loss_fn(model, batch)

    switched = polyamp.Monitor(every=2)
    step = polyamp.train_step(counted, RECIPE, monitor=switched)
    state = polyamp.init(made.model, RECIPE)
    compiled = []
    for number in range(12):
        switched.enabled, switched.every = number % 5 != 0, 2 + number % 3
        state, _ = step(state, whole_batch(number))
        compiled.append(len(traces))
    assert compiled[-1] == compiled[5], "both programs were compiled in the first steps"
    assert switched.records

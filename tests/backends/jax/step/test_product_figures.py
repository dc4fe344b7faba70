"""Figures of products in 8 bits in JAX: recomputation, scans, steps inside of a scan (S35, S36)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyamp
from polyamp.monitor.records import PRODUCT_OPERANDS, MonitorRecord, ProductStats
from tests.backends.jax.precision.test_float8 import POLICY, Net, X, loss_fn

RECIPE = polyamp.Recipe(policy=POLICY, optimizer=polyamp.sgd(0.1))
BATCH = {"x": X, "y": jnp.cos(X)}


def products(record: MonitorRecord) -> dict[str, ProductStats]:
    return {each.module: each.products for each in record.modules if each.products is not None}


def recorded(kind: str, **options: Any) -> dict[str, ProductStats]:
    monitor = polyamp.Monitor(every=1, gradients=False, updates=False, products=True, **options)
    polyamp.train_step(loss_fn, RECIPE, monitor=monitor)(polyamp.init(Net(kind), RECIPE), BATCH)
    return products(monitor.records[0])


def check_alike(found: dict[str, ProductStats], expected: dict[str, ProductStats]) -> None:
    assert set(found) == set(expected) == {"", "first"}
    for path, stats in found.items():
        for name in PRODUCT_OPERANDS:
            one, other = getattr(stats, name), getattr(expected[path], name)
            assert one.elements == other.elements, (path, name)
            assert one.sqnr == pytest.approx(other.sqnr, abs=0.1), (path, name)


@pytest.mark.parametrize("kind", ["remat", "scan"])
def test_s36_structures_have_the_figures_of_the_plain_model(kind: str) -> None:
    found = recorded(kind)
    rows = X.shape[0]
    assert found[""].inputs.elements == found[""].gradients.elements == 2 * rows * 32
    assert found[""].weights.elements == 2 * 32 * 32
    check_alike(found, recorded("plain"))


def test_s36_outputs_are_measured_beside_them() -> None:
    check_alike(recorded("remat", activations=True), recorded("plain"))


def test_s36_steps_inside_of_a_scan_have_the_figures_of_steps() -> None:
    def run(monitor: polyamp.Monitor, *, inside: bool) -> list[MonitorRecord]:
        state = polyamp.init(Net(), RECIPE)
        step = polyamp.train_step(loss_fn, RECIPE, monitor=monitor, compile=not inside)
        if inside:
            many = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), BATCH)
            state, results = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches))(state, many)
            monitor.read(state, results)
        else:
            for _ in range(4):
                state, _ = step(state, BATCH)
        return monitor.records

    one, other = (
        run(polyamp.Monitor(every=2, gradients=False, updates=False, products=True), inside=inside)
        for inside in (True, False)
    )
    assert [each.call for each in one] == [each.call for each in other] == [2, 4]
    for found, expected in zip(one, other, strict=True):
        check_alike(products(found), products(expected))


def test_s36_a_monitor_of_products_changes_no_step() -> None:
    ends = []
    for monitor in (None, polyamp.Monitor(every=1, products=True)):
        state, step = polyamp.init(Net(), RECIPE), polyamp.train_step(loss_fn, RECIPE, monitor=monitor)
        for _ in range(2):
            state, _ = step(state, BATCH)
        ends.append(np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(state.params)]))
    np.testing.assert_allclose(ends[0], ends[1], rtol=0, atol=2.0**-10)

"""Figures of modules' outputs in JAX: recomputation, scans, branches, and steps inside of a scan (S35)."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyamp
from polyamp.monitor.records import MonitorRecord, OutputStats

RECIPE = polyamp.Recipe(
    policy="mixed_float16", optimizer=polyamp.sgd(0.01), scaler=polyamp.LossScaler(init_scale=2.0**10)
)
ROWS = 8


class Block(nn.Module):
    """A residual layer, in the form that `nn.scan` takes."""

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        return x + nn.Dense(4, name="dense")(x), None


class Net(nn.Module):
    """Three blocks, one after the other, recomputed or scanned; and a head in one of two branches."""

    kind: str

    @nn.compact
    def __call__(self, x: Any) -> Any:
        if self.kind == "scan":
            many = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            x, _ = many(name="blocks")(x, None)
        else:
            block = nn.remat(Block, prevent_cse=False) if self.kind == "remat" else Block
            for number in range(3):
                x, _ = block(name=f"block{number}")(x)
        head = nn.Dense(2, name="head")
        if self.kind == "branch" and not self.is_initializing():
            return nn.cond(jnp.sum(x) < 1e30, lambda m, x: m(x), lambda m, x: m(2.0 * x), head, x)
        return head(x)


def loss_fn(model: Any, batch: Any) -> Any:
    return jnp.mean(jnp.square(model(batch).astype(jnp.float32) - 1.0))


def batch(seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=(ROWS, 4)).astype(np.float32)


def state_of(kind: str) -> Any:
    module = Net(kind)
    return polyamp.init((module, module.init(jax.random.key(0), batch())), RECIPE)


def outputs(record: MonitorRecord) -> dict[str, OutputStats]:
    return {each.module: each.activations for each in record.modules if each.activations is not None}


def recorded(kind: str) -> dict[str, OutputStats]:
    monitor = polyamp.Monitor(every=1, gradients=False, updates=False, activations=True)
    polyamp.train_step(loss_fn, RECIPE, monitor=monitor)(state_of(kind), batch())
    return outputs(monitor.records[0])


def test_s35_recomputed_and_branching_modules_are_counted_once() -> None:
    plain = recorded("plain")
    sizes = {path: stats.elements for path, stats in plain.items()}
    assert sizes == {"": 16, "head": 16} | {
        f"block{number}{inner}": 32 for number in range(3) for inner in ("", "/dense")
    }
    for kind in ("remat", "branch"):
        found = recorded(kind)
        assert {path: stats.elements for path, stats in found.items()} == sizes
        for path, stats in found.items():
            assert stats.rms == pytest.approx(plain[path].rms, rel=1e-2), (kind, path)
            assert stats.largest == pytest.approx(plain[path].largest, rel=1e-2), (kind, path)


def test_s35_iterations_of_a_scan_are_added_up() -> None:
    found = recorded("scan")
    assert [found[path].elements for path in ("blocks", "blocks/dense")] == [3 * 32, 3 * 32]
    assert 0.0 < found["blocks"].rms < found["blocks"].largest < 100.0


def test_s35_steps_inside_of_a_scan_measure_every_nth_update_only() -> None:
    monitor = polyamp.Monitor(every=2, gradients=False, updates=False, activations="head")
    step = polyamp.train_step(loss_fn, RECIPE, monitor=monitor, compile=False)
    batches = jnp.stack([batch(seed) for seed in range(4)])
    state = state_of("plain")
    _, results = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches))(state, batches)
    assert np.asarray(results.monitor.activations["head"].sums)[:, 0].tolist() == [0.0, 16.0, 0.0, 16.0]
    records = monitor.read(state, results)
    assert [record.call for record in records] == [2, 4]
    alone = polyamp.Monitor(every=2, gradients=False, updates=False, activations="head")
    one, step = state_of("plain"), polyamp.train_step(loss_fn, RECIPE, monitor=alone)
    for row in batches:
        one, _ = step(one, row)
    for record, expected in zip(records, alone.records, strict=True):
        mine, theirs = outputs(record)["head"], outputs(expected)["head"]
        assert mine.elements == theirs.elements
        assert mine.rms == pytest.approx(theirs.rms, rel=1e-3)

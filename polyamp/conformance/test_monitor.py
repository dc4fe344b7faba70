"""Rule S35: what a monitor reads of a step, per module, and that it changes none."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.conformance.problems import batch, changed_arrays, is_on_cpu, layers, loss_fn, modules_of, recipe
from polyamp.contract.backend import Backend, MonitorsSteps
from polyamp.contract.harness import Harness
from polyamp.errors import ArgumentError, UnsupportedError
from polyamp.monitor.exponents import tensor_stats

SCALE = 2.0**10


@pytest.fixture
def monitors(backend: Backend, harness: Harness) -> bool:
    """Whether the backend has monitors; if not, that it refuses one by name."""
    if isinstance(backend, MonitorsSteps):
        return True
    made = recipe()
    step = polyamp.train_step(loss_fn, made, monitor=polyamp.Monitor())
    with pytest.raises(UnsupportedError, match=f"the {backend.name} backend of this version has no monitor"):
        step(polyamp.init(harness.mlp(layers()), made), batch())
    return False


def parameters(backend: Backend, state: Any) -> dict[str, Any]:
    """Return path -> parameter, on the host."""
    exported = backend.export_state(state)
    return {name.removeprefix("model/"): np.array(v) for name, v in exported.items() if name.startswith("model/")}


def counts(array: Any) -> Any:
    """Return the number of elements with each exponent field, by frexp."""
    flat = np.asarray(array, np.float32).reshape(-1)
    _, exponents = np.frexp(flat)
    fields = np.where(flat == 0.0, 0, np.where(np.isfinite(flat), exponents + 126, 255))
    return np.bincount(fields, minlength=256)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_s35_figures_are_those_of_gradients_weights_and_updates(
    backend: Backend, harness: Harness, monitors: bool, policy: str, accumulate: int
) -> None:
    if not monitors:
        return
    made = recipe(
        policy,
        optimizer=polyamp.adam(0.1),
        clip_norm=0.01,
        scaler=polyamp.LossScaler(init_scale=SCALE),
        accumulate_steps=accumulate,
    )
    monitor = polyamp.Monitor(every=2, weights=True)
    state = polyamp.init(harness.mlp(layers()), made)
    step = polyamp.train_step(loss_fn, made, monitor=monitor)
    state, _ = step(state, batch(0))
    before = parameters(backend, state)
    _, grads = polyamp.value_and_grad(loss_fn)(state, batch(1))
    gradients = {name: np.array(backend.to_numpy(value)) for name, value in backend.named_gradients(grads)}
    state, result = step(state, batch(1))
    after = parameters(backend, state)
    assert result.monitor is None
    (record,) = monitor.records
    assert (record.call, record.step, record.skipped, record.skips) == (2, 2, False, 0)
    assert (record.scale, record.next_scale) == (SCALE, SCALE)
    assert record.loss == float(backend.to_numpy(result.loss))
    assert record.grad_norm == float(backend.to_numpy(result.grad_norm))
    assert [each.module for each in record.modules] == modules_of(state)
    for each in record.modules:
        assert each.weights is not None
        assert each.gradients is not None
        own = [name for name in before if name.rpartition("/")[0] == each.module]
        weight = np.concatenate([before[name].reshape(-1) for name in own])
        update = np.concatenate([(after[name] - before[name]).reshape(-1) for name in own])
        assert each.weights == tensor_stats(counts(weight), each.weights.norm, made.policy.compute)
        assert each.weights.norm == pytest.approx(np.linalg.norm(weight), rel=1e-5)
        assert each.update_ratio == pytest.approx(np.linalg.norm(update) / np.linalg.norm(weight), rel=1e-4)
        grad = np.concatenate([gradients[name].reshape(-1) for name in own])
        assert each.gradients.elements == grad.size
        assert each.gradients.norm == pytest.approx(np.linalg.norm(grad), rel=1e-2 if accumulate > 1 else 1e-5)
        if accumulate == 1 and is_on_cpu(backend):
            stats = tensor_stats(counts(grad), each.gradients.norm, made.policy.compute, SCALE)
            assert each.gradients == stats


def test_s35_a_monitor_changes_no_step(backend: Backend, harness: Harness, monitors: bool) -> None:
    """Bit for bit where two programs of one operation have the same bits."""
    if not monitors or not is_on_cpu(backend):
        return
    made = recipe("mixed_float16", optimizer=polyamp.adam(0.1), scaler=polyamp.LossScaler(init_scale=2.0**20))
    exported = []
    for monitor in (None, polyamp.Monitor(every=3)):
        state = polyamp.init(harness.normalized_mlp(layers()), made)
        step = polyamp.train_step(loss_fn, made, monitor=monitor)
        for number in range(8):
            state, _ = step(state, batch(number))
        exported.append(backend.export_state(state))
    plain, watched = exported
    for name in changed_arrays(plain, watched):
        np.testing.assert_allclose(plain[name], watched[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_s35_a_skipped_step_is_a_record_with_what_came_out(backend: Backend, harness: Harness, monitors: bool) -> None:
    if not monitors:
        return
    made = recipe("mixed_float16", scaler=polyamp.LossScaler(init_scale=16.0))
    monitor = polyamp.Monitor(every=3)
    state = polyamp.init(harness.mlp(layers()), made)
    step = polyamp.train_step(loss_fn, made, monitor=monitor)
    for number, gain in enumerate((1.0, np.inf, np.inf, 1.0, 1.0, 1.0)):
        state, _ = step(state, batch(number, gain=gain))
    first, second = monitor.records
    assert (first.call, first.step, first.skipped, first.skips) == (3, 1, True, 2)
    assert not math.isfinite(first.grad_norm)
    assert not math.isfinite(first.loss)
    assert first.next_scale == first.scale / 2 == 4.0
    assert all(each.gradients is not None and each.gradients.overflow > 0.0 for each in first.modules)
    assert all(each.update_ratio == 0.0 for each in first.modules)
    assert (second.call, second.step, second.skipped, second.skips) == (6, 4, False, 0)
    assert first.word == second.word == "searching"


def test_s35_modules_are_cut_to_a_depth_or_chosen_by_globs(backend: Backend, harness: Harness, monitors: bool) -> None:
    if not monitors:
        return
    made = recipe()
    state = polyamp.init(harness.mlp(layers()), made)
    every = modules_of(state)
    sizes = {}
    for modules in (None, every[-1], ["*none*"]):
        monitor = polyamp.Monitor(every=1, modules=modules, updates=False)
        state, _ = polyamp.train_step(loss_fn, made, monitor=monitor)(state, batch())
        sizes[str(modules)] = [
            (each.module, getattr(each.gradients, "elements", 0)) for each in monitor.records[0].modules
        ]
    assert [module for module, _ in sizes["None"]] == every
    assert sizes[every[-1]] == sizes["None"][-1:]
    assert sizes["['*none*']"] == []


def test_s35_it_is_switched_while_it_runs(backend: Backend, harness: Harness, monitors: bool) -> None:
    if not monitors:
        return
    made = recipe()
    monitor = polyamp.Monitor(every=1, gradients=False, updates=False)
    state = polyamp.init(harness.mlp(layers()), made)
    step = polyamp.train_step(loss_fn, made, monitor=monitor)
    for number in range(6):
        monitor.enabled = number != 1
        monitor.every = 1 if number < 3 else 2
        state, _ = step(state, batch(number))
    assert [record.call for record in monitor.records] == [1, 3, 4, 6]
    assert [record.modules for record in monitor.records] == [[]] * 4
    with pytest.raises(ArgumentError, match=r"every must be a positive int\. Received: 0"):
        monitor.every = 0


def test_s35_gradients_that_a_16_bit_pass_loses_are_seen(backend: Backend, harness: Harness, monitors: bool) -> None:
    """At a scale of 1 the gradients of a small loss are lost, at a larger one they are not."""
    if not monitors:
        return
    lost = []
    for scale in (1.0, 2.0**14):
        made = recipe("mixed_float16", scaler=polyamp.LossScaler.static(scale))
        monitor = polyamp.Monitor(every=1, updates=False)
        step = polyamp.train_step(loss_fn, made, monitor=monitor)
        step(polyamp.init(harness.mlp(layers()), made), batch(0, gain=2.0**-22))
        stats = [each.gradients for each in monitor.records[0].modules if each.gradients is not None]
        lost.append([each.zero + each.underflow + each.subnormal for each in stats])
        assert all(each.overflow == 0.0 for each in stats)
    assert min(lost[0]) > 0.9
    assert max(lost[1]) < 0.5


@pytest.mark.parametrize("accumulate", [1, 2])
def test_s35_outputs_of_modules_are_measured(
    backend: Backend, harness: Harness, monitors: bool, accumulate: int
) -> None:
    """Of the last layer all that can be known without a framework is computed here; an overflow is named by module."""
    if not monitors:
        return
    made = recipe("mixed_float16", scaler=polyamp.LossScaler(init_scale=SCALE), accumulate_steps=accumulate)
    shapes = layers()
    monitor = polyamp.Monitor(every=2, gradients=False, updates=False, activations=["*dense*"])
    state = polyamp.init(harness.mlp(shapes), made)
    step = polyamp.train_step(loss_fn, made, monitor=monitor)
    state, _ = step(state, batch(0))
    now, data = harness.weights(state), batch(1)
    first = data["x"] @ now[0].kernel + now[0].bias
    second = np.maximum(first, 0.0) @ now[1].kernel + now[1].bias
    state, _ = step(state, data)
    data["x"] = data["x"] * 2.0**18
    for _ in range(2):
        state, _ = step(state, data)
    record, overflown = monitor.records
    assert len(record.modules) == 2
    for each, outputs in zip(record.modules, (first, second), strict=True):
        stats = each.activations
        assert stats is not None
        assert each.gradients is None
        assert stats.elements == outputs.size
        assert (stats.zero, stats.underflow, stats.overflow) == (0.0, 0.0, 0.0)
        assert stats.rms == pytest.approx(np.sqrt(np.mean(outputs**2)), rel=1e-2)
        assert stats.largest == pytest.approx(np.abs(outputs).max(), rel=1e-2)
    stats = overflown.modules[0].activations
    assert stats is not None
    assert 0.5 < stats.overflow <= 1.0
    assert stats.largest == math.inf
    assert overflown.skipped


def test_s35_activations_that_match_no_module_are_refused(backend: Backend, harness: Harness, monitors: bool) -> None:
    if not monitors:
        return
    made = recipe()
    monitor = polyamp.Monitor(every=1, activations="decoder/**")
    step = polyamp.train_step(loss_fn, made, monitor=monitor)
    with pytest.raises(ArgumentError, match=r"activations=\['decoder/\*\*'\] matches none of the modules .*dense0"):
        step(polyamp.init(harness.mlp(layers()), made), batch())

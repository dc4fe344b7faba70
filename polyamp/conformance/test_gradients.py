"""Rules S6 to S11: the loss, gradients, accumulation, order, the finite flag and clipping."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.conformance.problems import (
    advance,
    batch,
    changed_arrays,
    flat_weights,
    layers,
    loss_and_aux,
    loss_fn,
    recipe,
    relative_difference,
    to_float,
    train,
)
from polyamp.contract.backend import Backend
from polyamp.contract.harness import DenseWeights, Harness
from polyamp.errors import BatchError


def test_s06_a_16_bit_loss_is_upcast_before_it_is_scaled(backend: Backend, harness: Harness) -> None:
    """3 * 2^15 is inf in float16."""
    scaler = polyamp.LossScaler(init_scale=2.0**15)
    state = scaler.init(backend.name)
    narrow = backend.cast(harness.array(np.asarray(3.0, np.float32)), "float16")
    scaled = backend.to_numpy(scaler.scale(narrow, state))
    assert scaled.dtype == np.float32
    assert float(scaled) == 3.0 * 2.0**15


def test_s06_a_16_bit_loss_trains(backend: Backend, harness: Harness) -> None:
    policy = polyamp.Policy(compute="float16", output="float16")
    made = recipe(policy, scaler=polyamp.LossScaler(init_scale=2.0**15))
    weights = [DenseWeights(np.full((2, 1), 1.5, np.float32), np.zeros(1, np.float32))]
    state = polyamp.init(harness.mlp(weights), made)
    step = polyamp.train_step(lambda model, batch: model(batch["x"])[0][0], made)
    _, result = step(state, {"x": np.ones((1, 2), np.float32)})
    loss = backend.to_numpy(result.loss)
    assert (loss.dtype.name, float(loss), bool(backend.to_numpy(result.skipped))) == ("float32", 3.0, False)


@pytest.mark.parametrize("scale", [2.0**-10, 2.0**15, 3.0])
def test_s07_gradients_are_those_of_the_unscaled_loss(backend: Backend, harness: Harness, scale: float) -> None:
    plain = polyamp.init(harness.mlp(layers()), recipe())
    scaled = polyamp.init(harness.mlp(layers()), recipe(scaler=polyamp.LossScaler.static(scale)))
    run = polyamp.value_and_grad(loss_fn)
    loss, want = run(plain, batch())
    scaled_loss, got = run(scaled, batch())
    assert to_float(backend, scaled_loss) == to_float(backend, loss)
    for (name, a), (_, b) in zip(backend.named_gradients(want), backend.named_gradients(got), strict=True):
        first, second = backend.to_numpy(a), backend.to_numpy(b)
        assert second.dtype == np.float32
        if scale == 3.0:
            np.testing.assert_allclose(second, first, rtol=2e-6, atol=1e-8, err_msg=name)
        else:
            assert np.array_equal(first, second), f"{name}: a power of two must be exact"


def test_s07_16_bit_gradients_are_widened_before_they_are_divided(backend: Backend, harness: Harness) -> None:
    """2^-10 / 2^15 is 0 in float16: what scaling saved would be lost again."""
    scaler = polyamp.LossScaler.static(2.0**15)
    state = scaler.init(backend.name)
    scaler.scale(harness.array(np.asarray(1.0, np.float32)), state)
    narrow = backend.cast([harness.array(np.full(3, 2.0**-10, np.float32))], "float16")
    (grad,), finite = scaler.unscale(narrow, state)
    wide = backend.to_numpy(grad)
    assert (wide.dtype.name, wide.tolist(), bool(backend.to_numpy(finite))) == ("float32", [2.0**-25] * 3, True)


def test_s07_value_and_grad_returns_what_loss_fn_returned(backend: Backend, harness: Harness) -> None:
    state = polyamp.init(harness.mlp(layers()), recipe(scaler=polyamp.LossScaler.static(8.0)))
    (loss, aux), _ = polyamp.value_and_grad(loss_and_aux)(state, batch())
    assert to_float(backend, loss) == to_float(backend, aux["loss"])


@pytest.mark.parametrize("optimizer", [polyamp.sgd(0.1, momentum=0.9), polyamp.adamw(1e-2)])
def test_s08_micro_batches_equal_one_batch(backend: Backend, harness: Harness, optimizer: Any) -> None:
    batches = [batch(i) for i in range(3)]
    settings: dict[str, Any] = {"optimizer": optimizer, "scaler": polyamp.LossScaler.static(1024.0), "clip_norm": 0.5}
    whole, whole_results = train(harness, recipe(**settings), batches)
    parts, part_results = train(harness, recipe(**settings, accumulate_steps=4), batches)
    assert relative_difference(flat_weights(harness, whole), flat_weights(harness, parts)) < 2e-5
    losses = [[to_float(backend, r.loss) for r in results] for results in (whole_results, part_results)]
    assert relative_difference(*losses) < 2e-6
    assert to_float(backend, part_results[-1].step) == 3


@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
def test_s08_16_bit_parameters_are_accumulated_in_float32(backend: Backend, harness: Harness, policy: str) -> None:
    """In 16 bits 256 + 1 is 256 (bfloat16), and 40,000 + 40,000 is infinite (float16)."""
    first, rest, count = {"bfloat16": (256.0, 1.0, 16), "float16": (40000.0, 40000.0, 4)}[policy]
    dtype = backend.to_numpy(backend.cast(harness.array(np.zeros(1, np.float32)), policy)).dtype
    weights = [DenseWeights(np.zeros((1, 1), dtype), np.zeros(1, dtype))]
    made = recipe(policy, optimizer=polyamp.sgd(2.0**-8), accumulate_steps=count)
    state = polyamp.init(harness.mlp(weights), made)
    x = np.full((count, 1), rest, np.float32)
    x[0] = first
    state, result = polyamp.train_step(lambda model, batch: model(batch["x"])[0][0], made)(state, {"x": x})
    moved = -float(harness.weights(state)[0].kernel[0, 0])
    assert not bool(backend.to_numpy(result.skipped))
    np.testing.assert_allclose(moved, x.mean() * 2.0**-8, rtol=2.0**-8)
    np.testing.assert_allclose(to_float(backend, result.grad_norm), np.hypot(x.mean(), 1.0), rtol=2.0**-7)


def test_s08_a_list_of_micro_batches_equals_the_split_batch(harness: Harness) -> None:
    made = recipe(accumulate_steps=2)
    whole = batch()
    halves = [{name: value[i : i + 4] for name, value in whole.items()} for i in (0, 4)]
    split, _ = train(harness, made, [whole])
    listed, _ = train(harness, made, [halves])  # type: ignore[list-item]  # a list is the other accepted form
    assert np.array_equal(flat_weights(harness, split), flat_weights(harness, listed))


def test_s08_aux_is_stacked_and_loss_is_the_mean(backend: Backend, harness: Harness) -> None:
    made = recipe(accumulate_steps=4)
    state = polyamp.init(harness.mlp(layers()), made)
    _, result = polyamp.train_step(loss_and_aux, made)(state, batch())
    each = backend.to_numpy(result.aux["loss"])
    assert each.shape == (4,)
    np.testing.assert_allclose(to_float(backend, result.loss), each.mean(), rtol=1e-6)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"x": np.ones((8, 4), "f4"), "y": np.ones((4, 3), "f4"), "gain": np.ones((8, 3), "f4")}, "one length"),
        ({"x": np.ones((8, 4), "f4"), "y": np.ones((8, 3), "f4"), "gain": np.float32(1)}, "is a scalar"),
        ([batch(size=2)] * 5, "accumulate_steps=4 members, or fewer at the end of an epoch. Received: 5"),
        ([batch(size=2), batch(size=2, inputs=5)], "agree in structure and shape but for one length"),
        ([batch(size=2), {**batch(size=1), "y": batch(size=3)["y"]}], "agree in structure and shape but for one"),
        ([batch(size=2), batch(size=0)], "micro-batch 1 of the list has no rows"),
    ],
)
def test_s08_batches_that_cannot_be_split_are_refused(harness: Harness, broken: Any, message: str) -> None:
    made = recipe(accumulate_steps=4)
    state = polyamp.init(harness.mlp(layers()), made)
    before = flat_weights(harness, state)
    with pytest.raises(BatchError, match=message):
        polyamp.train_step(loss_fn, made)(state, broken)
    assert np.array_equal(flat_weights(harness, state), before)


def test_s09_unscale_comes_before_clip(backend: Backend, harness: Harness) -> None:
    results = {}
    for scale in (1.0, 2.0**12):
        made = recipe(scaler=polyamp.LossScaler.static(scale), clip_norm=0.25, optimizer=polyamp.sgd(1.0))
        state, (result,) = train(harness, made, [batch()])
        results[scale] = (flat_weights(harness, state), to_float(backend, result.grad_norm))
    assert np.array_equal(results[1.0][0], results[2.0**12][0])
    assert results[1.0][1] == results[2.0**12][1]


def test_s09_gradients_are_unscaled_with_the_scale_that_produced_them(backend: Backend, harness: Harness) -> None:
    """On a step that grows or backs off the scale, the reported loss and the update must not be off by the factor."""
    flags = [1.0, 1.0, np.inf, 1.0, 1.0, 1.0]
    moving = recipe(scaler=polyamp.LossScaler(init_scale=64.0, growth_interval=2))
    still = recipe(scaler=polyamp.LossScaler.static(64.0))
    batches = [batch(i, gain=gain) for i, gain in enumerate(flags)]
    moved, moved_results = train(harness, moving, batches)
    kept, kept_results = train(harness, still, batches)
    assert [to_float(backend, r.scale) for r in moved_results] == [64.0, 128.0, 64.0, 64.0, 128.0, 128.0]
    assert np.array_equal(flat_weights(harness, moved), flat_weights(harness, kept))
    finite = [i for i, gain in enumerate(flags) if gain == 1.0]
    losses = [[to_float(backend, results[i].loss) for i in finite] for results in (moved_results, kept_results)]
    assert losses[0] == losses[1]


def test_s09_replicas_take_the_same_decision(backend: Backend, harness: Harness) -> None:
    """Overflow on the second replica skips on both, and scale and weights stay identical."""
    made = recipe("mixed_float16", scaler=polyamp.LossScaler(init_scale=16.0))
    outcomes = harness.replicate(layers(), made, loss_fn, [[batch(0), batch(1)], [batch(2), batch(3, gain=np.inf)]])
    assert [to_float(backend, result.scale) for _, result in outcomes] == [8.0, 8.0]
    first, second = (flat_weights(harness, state) for state, _ in outcomes)
    assert np.array_equal(first, second)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_s10_flag_is_one_boolean_and_finds_every_kind(backend: Backend, harness: Harness, bad: float) -> None:
    scaler = polyamp.LossScaler(init_scale=16.0)
    state = scaler.init(backend.name)
    scaler.scale(harness.array(np.asarray(1.0, np.float32)), state)
    good = {"a": harness.array(np.ones(5, np.float32)), "b": [harness.array(np.full((2, 2), 32.0, np.float32)), None]}
    unscaled, finite = scaler.unscale(good, state)
    assert float(backend.to_numpy(unscaled["b"][0])[0, 0]) == 2.0
    assert unscaled["b"][1] is None
    flag = backend.to_numpy(finite)
    assert (flag.shape, flag.dtype.name, bool(flag)) == ((), "bool", True)
    for size in (5, 2**16):  # under XLA a maximum loses a NaN among many numbers
        poisoned = np.ones(size, np.float32)
        poisoned[3] = bad
        _, finite = scaler.unscale([harness.array(np.ones(3, np.float32)), harness.array(poisoned)], state)
        assert not bool(backend.to_numpy(finite))


def test_s10_flag_looks_after_unscaling(backend: Backend, harness: Harness) -> None:
    """1e36 is finite and 1e36 / 2^-14 is not."""
    scaler = polyamp.LossScaler.static(2.0**-14)
    state = scaler.init(backend.name)
    scaler.scale(harness.array(np.asarray(1.0, np.float32)), state)
    _, finite = scaler.unscale([harness.array(np.full(3, 1e36, np.float32))], state)
    assert not bool(backend.to_numpy(finite))


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_s10_a_step_whose_gradients_are_infinite_and_not_nan_is_skipped(
    backend: Backend, harness: Harness, clip_norm: float | None
) -> None:
    """One dense layer of ones and positive inputs: every product has one sign, so that no NaN gives the overflow away.
    The scale is no 16-bit number either: 2^20 alone overflows nothing (S6)."""
    ones = [DenseWeights(np.ones((4, 1), np.float32), np.zeros(1, np.float32))]
    item = {"x": np.ones((2, 4), np.float32), "y": np.zeros((2, 1), np.float32), "gain": np.ones((2, 1), np.float32)}
    made = recipe(scaler=polyamp.LossScaler.static(2.0**20), clip_norm=clip_norm)
    state = polyamp.init(harness.mlp(ones), made)
    before = backend.export_state(state)
    run, step = polyamp.value_and_grad(loss_fn), polyamp.train_step(loss_fn, made)
    large = {**item, "gain": item["gain"] * np.float32(1e18)}
    values = [backend.to_numpy(value) for _, value in backend.named_gradients(run(state, large)[1])]
    assert all(np.isinf(value).all() for value in values)
    state, result = step(state, large)
    assert bool(backend.to_numpy(result.skipped))
    assert changed_arrays(before, backend.export_state(state)) == []
    state, result = step(state, item)
    assert not bool(backend.to_numpy(result.skipped))


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("gain", [1e12, 1e-14])
def test_s10_gradients_whose_squares_leave_float32_are_finite(
    backend: Backend, harness: Harness, gain: float, clip_norm: float | None
) -> None:
    """The gradients lie near 1e24 and 1e-28: their squares overflow or vanish in float32, they do not."""
    made = recipe(scaler=polyamp.LossScaler.static(1.0), clip_norm=clip_norm, optimizer=polyamp.sgd(1e-3))
    item = batch(gain=gain)
    item["y"] *= 0.0
    state = polyamp.init(harness.mlp(layers()), made)
    _, gradients = polyamp.value_and_grad(loss_fn)(state, item)
    squares = [np.square(backend.to_numpy(g).astype(np.float64)).sum() for _, g in backend.named_gradients(gradients)]
    norm = float(np.sqrt(np.sum(squares)))
    assert not 1e-22 < norm < 1e20
    before = flat_weights(harness, state)
    state, result = polyamp.train_step(loss_fn, made)(state, item)
    assert not bool(backend.to_numpy(result.skipped))
    np.testing.assert_allclose(to_float(backend, result.grad_norm), norm, rtol=1e-5)
    if clip_norm and gain > 1:
        moved = np.linalg.norm((flat_weights(harness, state) - before).astype(np.float64))
        np.testing.assert_allclose(moved, 1e-3, rtol=1e-3)


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_s11_clip_by_global_norm(backend: Backend, harness: Harness, scale: float | None) -> None:
    """Of the unscaled gradients, whatever they were scaled with."""
    scaler = None if scale is None else polyamp.LossScaler.static(scale)
    free, (plain,) = train(harness, recipe(optimizer=polyamp.sgd(1.0)), [batch()])
    start = flat_weights(harness, polyamp.init(harness.mlp(layers()), recipe()))
    norm = to_float(backend, plain.grad_norm)
    np.testing.assert_allclose(np.linalg.norm(flat_weights(harness, free) - start), norm, rtol=1e-5)
    for limit, wanted in ((norm / 4, norm / 4), (norm * 4, norm)):
        made = recipe(optimizer=polyamp.sgd(1.0), clip_norm=limit, scaler=scaler)
        clipped, (result,) = train(harness, made, [batch()])
        np.testing.assert_allclose(np.linalg.norm(flat_weights(harness, clipped) - start), wanted, rtol=1e-5)
        np.testing.assert_allclose(to_float(backend, result.grad_norm), norm, rtol=1e-6)
        assert backend.to_numpy(result.grad_norm).dtype == np.float32


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_s11_clip_by_value(backend: Backend, harness: Harness, scale: float | None) -> None:
    """Each element of the unscaled gradients; what the caller gives to `apply_gradients` stays as it is."""
    scaler = None if scale is None else polyamp.LossScaler.static(scale)
    start = polyamp.init(harness.mlp(layers()), recipe())
    _, grads = polyamp.value_and_grad(loss_fn)(start, batch())
    plain = [backend.to_numpy(value) for _, value in backend.named_gradients(grads)]
    limit = float(np.median(np.abs(np.concatenate([value.ravel() for value in plain]))))
    wanted = np.concatenate([np.clip(value, -limit, limit).ravel() for value in plain])
    before = flat_weights(harness, start)
    made = recipe(optimizer=polyamp.sgd(1.0), clip_value=limit, scaler=scaler)
    clipped, (result,) = train(harness, made, [batch()])
    moved = np.sort(before - flat_weights(harness, clipped))
    np.testing.assert_allclose(moved, np.sort(wanted), rtol=1e-5, atol=1e-7)
    norm = np.sqrt(sum(float(np.sum(np.square(value, dtype=np.float64))) for value in plain))
    np.testing.assert_allclose(to_float(backend, result.grad_norm), norm, rtol=1e-5)
    state = polyamp.init(harness.mlp(layers()), made)
    _, given = polyamp.value_and_grad(loss_fn)(state, batch())
    polyamp.apply_gradients(state, given)
    for (_, value), expected in zip(backend.named_gradients(given), plain, strict=True):
        np.testing.assert_allclose(backend.to_numpy(value), expected, rtol=1e-5, atol=1e-7)


def test_s11_clip_eps_is_added_to_the_norm(backend: Backend, harness: Harness) -> None:
    """With 1e-6 as torch's `clip_grad_norm_`; at a norm of 1e-3 gradients are a thousandth smaller."""

    def small(model: Any, batch: Any) -> Any:
        return loss_fn(model, batch) * 1e-3

    start = flat_weights(harness, polyamp.init(harness.mlp(layers()), recipe()))
    moved, norm = {}, 0.0
    for eps in (0.0, 1e-6):
        made = recipe(optimizer=polyamp.sgd(1000.0), clip_norm=5e-4, clip_eps=eps)
        state, (result,) = advance(polyamp.init(harness.mlp(layers()), made), [batch()], small)
        moved[eps], norm = start - flat_weights(harness, state), to_float(backend, result.grad_norm)
    assert 6e-4 < norm < 1e-2
    share = np.linalg.norm(moved[1e-6]) / np.linalg.norm(moved[0.0])
    np.testing.assert_allclose(1.0 - share, 1e-6 / (norm + 1e-6), rtol=0.02)


def test_s11_a_gradient_that_is_not_finite_is_not_clipped_away(backend: Backend, harness: Harness) -> None:
    made = recipe(optimizer=polyamp.sgd(1.0), clip_value=1.0, scaler=polyamp.LossScaler(init_scale=2.0))
    start = flat_weights(harness, polyamp.init(harness.mlp(layers()), made))
    state, (result,) = train(harness, made, [{**batch(), "gain": np.full_like(batch()["gain"], np.inf)}])
    assert bool(backend.to_numpy(result.skipped))
    np.testing.assert_array_equal(flat_weights(harness, state), start)

"""Rules S15 to S19: the loss-scale rule, its traces, its bounds, its state, and scaling switched off."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import polyamp
from polyamp.conformance.problems import batch, flat_weights, is_on_cpu, layers, loss_fn, recipe, to_float, train
from polyamp.conformance.published_scalers import OVERFLOWS, PUBLISHED_SCALERS
from polyamp.contract.backend import Backend
from polyamp.contract.harness import Harness
from polyamp.errors import LossScaleStuckError


def scale_oracle(scaler: polyamp.LossScaler, flags: list[bool]) -> list[tuple[float, int, int, int, int]]:
    """The pseudo-code of S15 in plain Python: (scale, good_steps, hysteresis, skipped, stuck) after each flag."""
    scale, good, hysteresis, skipped, stuck = scaler.init_scale, 0, scaler.hysteresis, 0, 0
    trace = []
    for finite in flags:
        if finite:
            good, stuck = good + 1, 0
            if scaler.consecutive_hysteresis:
                hysteresis = scaler.hysteresis
            if good >= scaler.growth_interval + (scaler.growth_delay != "none"):
                scale = min(float(np.float32(scale) * np.float32(scaler.growth_factor)), scaler.max_scale)
                good = int(scaler.growth_delay == "after_overflow")
                hysteresis = scaler.hysteresis
        else:
            good, hysteresis, skipped = 0, max(hysteresis - 1, -1), skipped + 1
            if hysteresis <= 0:
                scale = max(float(np.float32(scale) * np.float32(scaler.backoff_factor)), scaler.min_scale)
            stuck = stuck + 1 if scale == scaler.min_scale else 0
        trace.append((scale, good, hysteresis, skipped, stuck))
    return trace


@pytest.mark.parametrize("name", ["torch", "megatron", "consecutive", "deepspeed"])
def test_s16_reference_traces_through_the_step(backend: Backend, harness: Harness, name: str) -> None:
    """The scales of each source's own rule (`published`), through whole training steps."""
    reference = PUBLISHED_SCALERS[name]
    scaler = polyamp.LossScaler(init_scale=16.0, growth_interval=4, **reference.settings)
    made = recipe("mixed_float16", scaler=scaler)
    _, results = train(harness, made, [batch(i, gain=np.inf if bad else 1.0) for i, bad in enumerate(OVERFLOWS)])
    assert [to_float(backend, r.scale) for r in results] == reference.scales()
    assert [int(backend.to_numpy(r.skipped)) for r in results] == OVERFLOWS
    assert to_float(backend, results[-1].step) == OVERFLOWS.count(0)


@pytest.mark.parametrize("name", PUBLISHED_SCALERS)
def test_s16_reference_traces_through_update(backend: Backend, harness: Harness, name: str) -> None:
    reference = PUBLISHED_SCALERS[name]
    scaler = polyamp.LossScaler(init_scale=16.0, growth_interval=4, **reference.settings)
    state, seen = scaler.init(backend.name), []
    for bad in OVERFLOWS:
        state = scaler.update(state, harness.array(np.asarray(not bad)))
        seen.append(to_float(backend, state.scale))
    assert seen == reference.scales()


def test_s15_the_scale_grows_beyond_a_smaller_growth_interval(backend: Backend, harness: Harness) -> None:
    """A run saved with 1,500 good steps goes on with an interval of 4: the count is beyond it already."""
    state = polyamp.LossScaler(init_scale=16.0).init(backend.name)
    late = state._replace(good_steps=backend.scalar(1500, "int32", like=state.good_steps))
    new = polyamp.LossScaler(init_scale=16.0, growth_interval=4).update(late, harness.array(np.asarray(True)))
    assert [to_float(backend, value) for value in new] == [32.0, 0.0, 1.0, 0.0, 0.0]


@st.composite
def scalers(draw: st.DrawFn) -> polyamp.LossScaler:
    """Any dynamic scaler with power-of-two bounds."""
    low = draw(st.integers(-14, 10))
    high = draw(st.integers(low, 24))
    return polyamp.LossScaler(
        init_scale=2.0 ** draw(st.integers(low, high)),
        min_scale=2.0**low,
        max_scale=2.0**high,
        growth_factor=draw(st.sampled_from([1.0, 2.0, 4.0, 1.5])),
        backoff_factor=draw(st.sampled_from([0.5, 0.25, 0.75, 1.0])),
        growth_interval=draw(st.integers(1, 5)),
        hysteresis=draw(st.integers(1, 3)),
        consecutive_hysteresis=draw(st.booleans()),
        growth_delay=draw(st.sampled_from(["none", "after_overflow", "always"])),
    )


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(scaler=scalers(), flags=st.lists(st.booleans(), min_size=1, max_size=20))
def test_s15_update_follows_the_rule(
    backend: Backend, harness: Harness, scaler: polyamp.LossScaler, flags: list[bool]
) -> None:
    """Random flags and settings: every backend equals the oracle, and so every other backend; S17's bounds hold."""
    state = scaler.init(backend.name)
    for flag, want in zip(flags, scale_oracle(scaler, flags), strict=True):
        state = scaler.update(state, harness.array(np.asarray(flag)))
        values = [backend.to_numpy(value) for value in state]
        assert [value.dtype.name for value in values] == ["float32", *["int32"] * 4]
        assert tuple(value.item() for value in values) == want
        assert np.isfinite(values[0])
        assert scaler.min_scale <= values[0] <= scaler.max_scale


def test_s17_the_scale_never_reaches_zero_and_recovers(backend: Backend, harness: Harness) -> None:
    """200 overflows, then a finite step: plain torch and Keras reach scale 0 and write NaN."""
    scaler = polyamp.LossScaler(init_scale=16.0, on_stuck="ignore")
    bad, good = batch(gain=np.inf), batch()
    made = recipe("mixed_float16", scaler=scaler)
    state, results = train(harness, made, [bad] * 200 + [good])
    scales = [to_float(backend, r.scale) for r in results]
    assert min(scales) == scales[-1] == 2.0**-14
    assert not bool(backend.to_numpy(results[-1].skipped))
    assert np.isfinite(flat_weights(harness, state)).all()


def test_s17_the_scale_never_exceeds_its_ceiling(backend: Backend, harness: Harness) -> None:
    scaler = polyamp.LossScaler(init_scale=2.0**22, growth_interval=1)
    state = scaler.init(backend.name)
    for _ in range(5):
        state = scaler.update(state, harness.array(np.asarray(True)))
    assert to_float(backend, state.scale) == 2.0**24


def test_s17_stuck_names_the_parameters(backend: Backend, harness: Harness) -> None:
    scaler = polyamp.LossScaler(init_scale=2.0, min_scale=1.0, patience=3)
    made = recipe("mixed_float16", scaler=scaler)
    step, states = polyamp.train_step(loss_fn, made), [polyamp.init(harness.mlp(layers()), made)]

    def loop() -> None:
        for _ in range(6):
            states.append(step(states[-1], batch(gain=np.nan))[0])

    with pytest.raises(LossScaleStuckError, match=r"at its floor of 1: .* inf or NaN gradients: .*dense0") as caught:
        loop()
    error = caught.value
    assert [name.rpartition("/")[0][-6:] for name in error.parameters] == ["dense0", "dense0", "dense1", "dense1"]
    assert error.loss_is_finite is False
    assert error.call == "polyamp.find_nonfinite(loss_fn, state.recipe.policy, state.model, batch, loss_scale=1)"
    assert "The loss is not finite either: the forward pass breaks. Look for" in str(error)
    assert error.call in str(error)


def test_s17_the_state_stays_usable_when_it_is_stuck(backend: Backend, harness: Harness) -> None:
    made = recipe("mixed_float16", scaler=polyamp.LossScaler(init_scale=1.0, min_scale=1.0, patience=1))
    state, step = polyamp.init(harness.mlp(layers()), made), polyamp.train_step(loss_fn, made)
    with pytest.raises(LossScaleStuckError):
        step(state, batch(gain=np.nan))
    before = polyamp.init(harness.mlp(layers()), made)
    assert np.array_equal(flat_weights(harness, state), flat_weights(harness, before))
    _, result = step(state, batch())
    assert not bool(backend.to_numpy(result.skipped))


def test_s17_stuck_can_warn_or_be_ignored(backend: Backend, harness: Harness) -> None:
    settings: dict[str, Any] = {"init_scale": 1.0, "min_scale": 1.0, "patience": 2}
    bad = [batch(gain=np.nan)] * 2
    train(harness, recipe(scaler=polyamp.LossScaler(**settings)), [batch(), batch()])
    with pytest.warns(UserWarning, match="2 steps in a row were skipped"):
        train(harness, recipe(scaler=polyamp.LossScaler(**settings, on_stuck="warn")), bad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(harness, recipe(scaler=polyamp.LossScaler(**settings, on_stuck="ignore")), bad)


def test_s18_state_is_whole_and_built_anew(backend: Backend, harness: Harness) -> None:
    scaler = polyamp.LossScaler(hysteresis=3)
    first, second = scaler.init(backend.name), scaler.init(like=harness.array(np.ones(2, np.float32)))
    for a, b in zip(first, second, strict=True):
        assert a is not b
        assert backend.to_numpy(a).shape == ()
    assert [backend.to_numpy(value).dtype.name for value in first] == ["float32", *["int32"] * 4]
    assert [to_float(backend, value) for value in first] == [2.0**15, 0, 3, 0, 0]
    assert len({id(value) for value in (*first, *second)}) == 10


def test_s18_state_moves_to_another_backend(backend: Backend, harness: Harness) -> None:
    scaler = polyamp.LossScaler(init_scale=16.0, hysteresis=2, growth_interval=4)
    state = scaler.init(backend.name)
    for flag in (True, False, False, True):
        state = scaler.update(state, harness.array(np.asarray(flag)))
    moved = polyamp.LossScaleState(*(backend.to_numpy(value) for value in state))
    for flag in (True, True, True, False):
        state = scaler.update(state, harness.array(np.asarray(flag)))
        moved = scaler.update(moved, np.asarray(flag))
    assert [to_float(backend, value) for value in state] == [float(value) for value in moved]


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_s19_off_gives_the_results_of_plain_code(backend: Backend, harness: Harness, clip_norm: float | None) -> None:
    batches = [batch(i) for i in range(4)]
    off, results = train(harness, recipe(scaler=polyamp.LossScaler.off(), clip_norm=clip_norm), batches)
    on, _ = train(harness, recipe(scaler=polyamp.LossScaler.static(1.0), clip_norm=clip_norm), batches)
    rounding = 0.0 if is_on_cpu(backend) else 1e-6  # off the CPU the optimizer's kernels round in another order
    np.testing.assert_allclose(flat_weights(harness, off), flat_weights(harness, on), rtol=rounding, atol=rounding / 10)
    assert {to_float(backend, r.scale) for r in results} == {1.0}


def test_s19_off_checks_nothing_unless_asked(backend: Backend, harness: Harness) -> None:
    state, (result,) = train(harness, recipe(scaler=polyamp.LossScaler.off()), [batch(gain=np.nan)])
    assert not bool(backend.to_numpy(result.skipped))
    assert np.isnan(flat_weights(harness, state)).any(), "plain code writes the NaN"
    checked = recipe(scaler=polyamp.LossScaler.off(check_finite=True))
    state, (result,) = train(harness, checked, [batch(gain=np.nan)])
    assert bool(backend.to_numpy(result.skipped))
    assert np.isfinite(flat_weights(harness, state)).all()


def test_trap_a_hand_written_step_needs_only_three_calls(backend: Backend, harness: Harness) -> None:
    scaler = polyamp.LossScaler(init_scale=2.0**20)
    state = scaler.init(backend.name)
    scaled = scaler.scale(harness.array(np.asarray(0.5, np.float32)), state)
    assert to_float(backend, scaled) == 2.0**19, "a scale of 2^20 must not be cast to float16"
    (grad,), finite = scaler.unscale([harness.array(np.full(2, 2.0**20, np.float32))], state)
    assert backend.to_numpy(grad).tolist() == [1.0, 1.0]
    state = scaler.update(state, finite)
    assert [to_float(backend, value) for value in (state.scale, state.good_steps)] == [2.0**20, 1]


def test_trap_weights_survive_every_scale(backend: Backend, harness: Harness) -> None:
    """Adam on gradients that are all zero must not write NaN in a mixed policy."""
    made = recipe("mixed_float16", optimizer=polyamp.adam(1e-2))
    still = batch(gain=0.0)
    still["y"] *= 0.0
    state, results = train(harness, made, [still] * 3, weights=layers())
    assert np.isfinite(flat_weights(harness, state)).all()
    assert not any(bool(backend.to_numpy(r.skipped)) for r in results)
    assert loss_fn is not None


@pytest.mark.parametrize(
    "scaler",
    [polyamp.LossScaler.static(4.0, patience=2), polyamp.LossScaler(kind="off", check_finite=True, patience=2)],
    ids=["static", "off"],
)
def test_s17_every_kind_that_skips_can_get_stuck(harness: Harness, scaler: polyamp.LossScaler) -> None:
    with pytest.raises(LossScaleStuckError):
        train(harness, recipe(scaler=scaler), [batch(gain=np.nan)] * 2)


def test_s17_stuck_looks_at_every_micro_batch(harness: Harness) -> None:
    scaler = polyamp.LossScaler(init_scale=1.0, min_scale=1.0, patience=2)
    made = recipe(scaler=scaler, accumulate_steps=2)
    state = polyamp.init(harness.mlp(layers()), made)
    step = polyamp.train_step(loss_fn, made)
    large = batch(gain=1e20)
    large["y"] *= 0.0
    state, _ = step(state, [batch(), large])
    with pytest.raises(LossScaleStuckError, match=r"gradients: (?!none).*dense") as caught:
        step(state, [batch(), large])
    assert "state.model, batch[1], loss_scale=1)" in caught.value.call


def test_s17_stuck_names_parameters_whose_gradients_are_inf(backend: Backend, harness: Harness) -> None:
    """Infinite, not NaN: the usual overflow."""
    made = recipe(scaler=polyamp.LossScaler(init_scale=1.0, min_scale=1.0, patience=2))
    large = batch(gain=1e20)
    large["x"], large["y"] = np.ones_like(large["x"]), np.zeros_like(large["y"])
    state = polyamp.init(harness.mlp(layers((4, 3))), made)
    _, gradients = polyamp.value_and_grad(loss_fn)(state, large)
    values = [backend.to_numpy(value) for _, value in backend.named_gradients(gradients)]
    assert all(np.isinf(value).any() and not np.isnan(value).any() for value in values)
    with pytest.raises(LossScaleStuckError, match=r"gradients: (?!none).*dense0"):
        train(harness, made, [large] * 2, weights=layers((4, 3)))


def test_s17_holds_for_the_two_halves(backend: Backend, harness: Harness) -> None:
    """Not in `train_step` alone: a loop of `value_and_grad` and `apply_gradients` stood still in silence."""
    made = recipe(scaler=polyamp.LossScaler(init_scale=2.0, min_scale=1.0, patience=3))
    run, bad, skipped = polyamp.value_and_grad(loss_fn), batch(gain=np.nan), []

    def loop() -> None:
        state = polyamp.init(harness.mlp(layers()), made)
        for _ in range(7):
            _, gradients = run(state, bad)
            state, result = polyamp.apply_gradients(state, gradients)
            skipped.append(bool(backend.to_numpy(result.skipped)))

    with pytest.raises(LossScaleStuckError, match=r"3 steps in a row .* inf or NaN gradients: .*dense0.*dense1"):
        loop()
    assert skipped == [True, True]  # the third did not return


def test_s17_states_that_take_turns_are_all_watched(harness: Harness) -> None:
    made = recipe(scaler=polyamp.LossScaler(init_scale=1.0, min_scale=1.0, patience=2))
    step = polyamp.train_step(loss_fn, made)

    def turns() -> None:
        bad, fine = (polyamp.init(harness.mlp(layers()), made) for _ in range(2))
        for _ in range(4):
            bad, _ = step(bad, batch(gain=np.nan))
            fine, _ = step(fine, batch())

    with pytest.raises(LossScaleStuckError):
        turns()

"""S15 to S19: the loss-scale rule on NumPy scalars against the pseudo-code written out in plain Python."""

from __future__ import annotations

import copy
import math
import pickle
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyamp import LossScaleError, LossScaler, LossScaleState, Policy, UnsupportedError
from polyamp.array_namespace import PYTHON
from polyamp.conformance.published_scalers import OVERFLOWS, PUBLISHED_SCALERS
from polyamp.recipe.scaler import PRESETS
from polyamp.reference.arrays import XP


class Plain(NamedTuple):
    """The oracle's state: plain Python numbers."""

    scale: float
    good_steps: int
    hysteresis: int
    skipped: int
    stuck: int


def f32(values: Any) -> np.ndarray[Any, Any]:
    return np.asarray(values, np.float32)


def single(value: float) -> float:
    """`value` rounded to float32; a product of two such numbers is exact in float64, so one rounding is enough."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def oracle(scaler: LossScaler, state: Plain, finite: bool) -> Plain:
    """S15's pseudo-code, line by line."""
    scale, good, hysteresis, skipped, stuck = state
    if finite:
        good += 1
        if scaler.consecutive_hysteresis:
            hysteresis = scaler.hysteresis
        if good >= scaler.growth_interval + (scaler.growth_delay != "none"):
            scale = min(single(scale * single(scaler.growth_factor)), single(scaler.max_scale))
            good, hysteresis = int(scaler.growth_delay == "after_overflow"), scaler.hysteresis
        stuck = 0
    else:
        good, hysteresis, skipped = 0, hysteresis - 1, skipped + 1
        if hysteresis <= 0:
            scale = max(single(scale * single(scaler.backoff_factor)), single(scaler.min_scale))
        stuck = stuck + 1 if scale == single(scaler.min_scale) else 0
    return Plain(scale, good, hysteresis, skipped, stuck)


def numpy_state(scaler: LossScaler) -> LossScaleState:
    zero = np.int32(0)
    return LossScaleState(np.float32(scaler.init_scale), zero, np.int32(scaler.hysteresis), zero, zero)


def trajectory(scaler: LossScaler, overflows: Iterable[Any]) -> list[LossScaleState]:
    states = [numpy_state(scaler)]
    for overflow in overflows:
        states.append(scaler.next_state(states[-1], not overflow, XP))
    return states[1:]


@pytest.mark.parametrize("name", PUBLISHED_SCALERS)
def test_s16_traces_through_the_methods(name: str) -> None:
    scaler = LossScaler(init_scale=16.0, growth_interval=4, **PUBLISHED_SCALERS[name].settings)
    state, scales = scaler.init("reference"), []
    for overflow in OVERFLOWS:
        state = scaler.update(state, finite=not overflow)
        scales.append(float(state.scale))
    assert scales == PUBLISHED_SCALERS[name].scales()
    assert int(state.skipped) == sum(OVERFLOWS)


@pytest.mark.parametrize("name", PUBLISHED_SCALERS)
def test_s16_oracle_agrees_with_the_traces(name: str) -> None:
    scaler = LossScaler(init_scale=16.0, growth_interval=4, **PUBLISHED_SCALERS[name].settings)
    state, scales = Plain(16.0, 0, scaler.hysteresis, 0, 0), []
    for overflow in OVERFLOWS:
        state = oracle(scaler, state, not overflow)
        scales.append(state.scale)
    assert scales == PUBLISHED_SCALERS[name].scales()


@st.composite
def scalers(draw: st.DrawFn) -> LossScaler:
    """Any dynamic or static scaler; half of them with powers of two."""
    if draw(st.booleans()):
        number = st.integers(-126, 127).map(lambda power: 2.0**power)
    else:
        number = st.floats(2.0**-126, 2.0**127, width=32)
    low, init, high = sorted(draw(st.tuples(number, number, number)))
    factor = st.one_of(st.sampled_from([1.0, 2.0, 1.5, 1e3]), st.floats(1.0, 2.0**127))
    return LossScaler(
        kind=draw(st.sampled_from(["dynamic", "dynamic", "dynamic", "static"])),
        init_scale=init,
        min_scale=low,
        max_scale=high,
        growth_factor=draw(factor),
        backoff_factor=1.0 / draw(factor.filter(lambda value: value <= 2.0**126)),
        growth_interval=draw(st.integers(1, 6)),
        hysteresis=draw(st.integers(1, 4)),
        consecutive_hysteresis=draw(st.booleans()),
        growth_delay=draw(st.sampled_from(["none", "after_overflow", "always"])),
    )


@given(scalers(), st.lists(st.booleans(), max_size=80))
@settings(max_examples=300, deadline=None)
def test_s15_s17_matches_the_oracle_for_every_configuration(scaler: LossScaler, overflows: list[bool]) -> None:
    state = Plain(single(scaler.init_scale), 0, scaler.hysteresis, 0, 0)
    for overflow, found in zip(overflows, trajectory(scaler, overflows), strict=True):
        state = oracle(scaler, state, not overflow)
        expected = state._replace(hysteresis=max(state.hysteresis, -1))
        assert tuple(value.item() for value in found) == tuple(expected)
        assert single(scaler.min_scale) <= found.scale <= single(scaler.max_scale)
        assert np.isfinite(found.scale)
        assert found.scale > 0
        assert [value.dtype.name for value in found] == ["float32", "int32", "int32", "int32", "int32"]
        assert [np.ndim(value) for value in found] == [0] * 5


@given(st.lists(st.booleans(), max_size=60))
@settings(deadline=None)
def test_s15_plain_numbers_give_the_same_trajectory(overflows: list[bool]) -> None:
    scaler = LossScaler(init_scale=16.0, growth_interval=3, hysteresis=2, min_scale=2.0, max_scale=64.0)
    state = LossScaleState(16.0, 0, 2, 0, 0)
    for overflow, found in zip(overflows, trajectory(scaler, overflows), strict=True):
        state = scaler.next_state(state, not overflow, PYTHON)
        assert tuple(state) == tuple(value.item() for value in found)


@pytest.mark.parametrize("kind", [bool, np.bool_, np.asarray])
def test_s15_flags_may_be_python_or_numpy_booleans(kind: Any) -> None:
    scaler = LossScaler(init_scale=8.0, growth_interval=1)
    state = numpy_state(scaler)
    assert float(scaler.next_state(state, kind(True), XP).scale) == 16.0
    assert float(scaler.next_state(state, kind(False), XP).scale) == 4.0


def test_s17_floor_and_stuck_counter() -> None:
    scaler = LossScaler(init_scale=4.0, min_scale=1.0)
    states = trajectory(scaler, [True] * 5 + [False, True])
    assert [float(state.scale) for state in states] == [2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert [int(state.stuck) for state in states] == [0, 1, 2, 3, 4, 0, 1]
    assert [int(state.skipped) for state in states] == [1, 2, 3, 4, 5, 5, 6]


def test_s17_two_hundred_overflows_stay_above_zero_and_recover() -> None:
    scaler = LossScaler(growth_interval=1)
    states = trajectory(scaler, [True] * 200 + [False] * 200)
    assert float(states[199].scale) == 2.0**-14
    assert float(states[-1].scale) == 2.0**24


def test_s17_growth_at_the_largest_ceiling_neither_overflows_nor_warns() -> None:
    scaler = LossScaler(init_scale=2.0**126, max_scale=2.0**127, growth_interval=1, growth_factor=2.0**127)
    assert [float(state.scale) for state in trajectory(scaler, [False] * 3)] == [2.0**127] * 3


def test_s15_hysteresis_counter_does_not_wrap_around() -> None:
    scaler = LossScaler(hysteresis=3)
    assert [int(state.hysteresis) for state in trajectory(scaler, [True] * 6)] == [2, 1, 0, -1, -1, -1]


def test_s15_growth_is_not_one_step_late() -> None:
    scales = [float(state.scale) for state in trajectory(LossScaler(init_scale=1.0, growth_interval=3), [False] * 6)]
    assert scales == [1.0, 1.0, 2.0, 2.0, 2.0, 4.0]


def test_s15_static_never_moves_but_counts() -> None:
    scaler = LossScaler.static(3.0, growth_interval=1)
    states = trajectory(scaler, [False, True, True, False])
    assert [float(state.scale) for state in states] == [3.0] * 4
    assert [int(state.skipped) for state in states] == [0, 1, 2, 2]
    assert [int(state.stuck) for state in states] == [0, 1, 2, 0]
    assert (scaler.scales, scaler.checks) == (True, True)


def test_s19_off() -> None:
    scaler = LossScaler.off()
    assert (scaler.scales, scaler.checks, scaler.init_scale) == (False, False, 1.0)
    checking = LossScaler.off(check_finite=True)
    assert (checking.scales, checking.checks) == (False, True)
    state = scaler.init("reference")
    loss = np.float32(0.1)
    assert scaler.scale(loss, state) == loss
    grads, _ = LossScaler.off().unscale({"w": f32([0.1, 0.2])}, state)
    np.testing.assert_array_equal(grads["w"], f32([0.1, 0.2]))


def test_s16_defaults() -> None:
    scaler = LossScaler()
    assert (scaler.init_scale, scaler.growth_factor, scaler.backoff_factor) == (2.0**15, 2.0, 0.5)
    assert (scaler.growth_interval, scaler.hysteresis, scaler.consecutive_hysteresis) == (2000, 1, False)
    assert (scaler.min_scale, scaler.max_scale) == (2.0**-14, 2.0**24)
    assert (scaler.patience, scaler.on_stuck, scaler.check_finite, scaler.kind) == (50, "raise", False, "dynamic")


@pytest.mark.parametrize(
    ("name", "init", "interval", "hysteresis", "low", "high", "delay"),
    [
        ("torch", 65536.0, 2000, 1, 2.0**-14, 2.0**127, "none"),
        ("keras", 32768.0, 2000, 1, 2.0**-14, 2.0**127, "none"),
        ("apex", 65536.0, 2000, 1, 2.0**-14, 2.0**24, "none"),
        ("deepspeed", 65536.0, 1000, 2, 1.0, 2.0**127, "after_overflow"),
        ("megatron", 4294967296.0, 1000, 2, 1.0, 2.0**127, "none"),
        ("jmp", 32768.0, 2000, 1, 1.0, 2.0**127, "none"),
        ("flax", 65536.0, 2000, 1, 2.0**-126, 2.0**127, "always"),
    ],
)
def test_s16_presets(
    name: str, init: float, interval: int, hysteresis: int, low: float, high: float, delay: str
) -> None:
    scaler = LossScaler.like(name)
    assert (scaler.init_scale, scaler.growth_interval, scaler.hysteresis) == (init, interval, hysteresis)
    assert (scaler.min_scale, scaler.max_scale, scaler.growth_delay) == (low, high, delay)
    assert (scaler.growth_factor, scaler.backoff_factor, scaler.consecutive_hysteresis) == (2.0, 0.5, False)


def test_s16_like() -> None:
    assert set(PRESETS) == {"torch", "keras", "apex", "deepspeed", "megatron", "jmp", "flax"}
    assert LossScaler.like("torch", growth_interval=7).growth_interval == 7
    with pytest.raises(LossScaleError, match=r"like\(\) knows torch, .*'megatorn'\. Did you mean 'megatron'\?"):
        LossScaler.like("megatorn")


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        ("mixed_float16", "dynamic"),
        ("float32", "off"),
        ("mixed_bfloat16", "off"),
        ("float16", "off"),
        ("O2", "dynamic"),
    ],
)
def test_for_policy(policy: str, kind: str) -> None:
    assert LossScaler.for_policy(Policy(policy)).kind == kind


def _number(name: str, value: Any) -> tuple[dict[str, Any], str]:
    return {name: value}, rf"{name} must be a positive float32 number, 2\^-126 to 2\^127\. Received: {name}="


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"kind": "auto"}, r"kind must be 'dynamic', 'static' or 'off'\. Received: kind='auto'\."),
    (
        {"growth_delay": 1},
        r"growth_delay must be 'none', 'after_overflow' or 'always'\. Received: growth_delay=1\.",
    ),
    ({"on_stuck": "stop"}, r"on_stuck must be 'raise', 'warn' or 'ignore'\. Received: on_stuck='stop'\."),
    *(
        _number(name, value)
        for name in ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale")
        for value in (0.0, -1.0, math.nan, math.inf, 2.0**128, 10**400, 2.0**-127)
    ),
    *(
        ({name: value}, rf"{name} must be a number\. Received: {name}=")
        for name in ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale")
        for value in (True, "2", None)
    ),
    *(
        ({name: value}, rf"{name} must be an integer of at least 1\. Received: {name}=")
        for name in ("growth_interval", "hysteresis", "patience")
        for value in (0, -3, 2.0, True, None, 2**31 - 1, 2**31)
    ),
    ({"init_scale": 2.0**25}, r"init_scale must lie between min_scale and max_scale\. .*init_scale=33554432\.0"),
    ({"init_scale": 2.0**-15}, r"init_scale must lie between min_scale and max_scale\."),
    ({"min_scale": 4.0, "init_scale": 2.0, "max_scale": 1.0}, r"min_scale=4\.0, init_scale=2\.0, max_scale=1\.0\."),
    ({"growth_factor": 0.5}, r"growth_factor must be at least 1\. Received: growth_factor=0\.5\."),
    ({"backoff_factor": 2.0}, r"backoff_factor must be at most 1\. Received: backoff_factor=2\.0\."),
    ({"check_finite": True}, r"check_finite is for kind='off'; kind='dynamic' always checks\. Drop it\."),
]


@pytest.mark.parametrize(("arguments", "message"), INVALID, ids=[str(arguments)[:60] for arguments, _ in INVALID])
def test_impossible_values_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(LossScaleError, match=message):
        LossScaler(**arguments)


def test_integers_are_taken_as_floats() -> None:
    scaler = LossScaler(init_scale=16, max_scale=32)
    assert type(scaler.init_scale) is type(scaler.max_scale) is float
    assert scaler == LossScaler(init_scale=16.0, max_scale=32.0)


def test_scaler_is_frozen_hashable_and_copies() -> None:
    scaler = LossScaler.like("megatron")
    with pytest.raises(AttributeError):
        scaler.init_scale = 1.0  # type: ignore[misc]
    for other in (copy.copy(scaler), copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert other == scaler
        assert hash(other) == hash(scaler)
    assert LossScaler() != scaler


def test_s18_state_is_built_anew() -> None:
    scaler = LossScaler(init_scale=16.0)
    one, other = scaler.init("reference"), scaler.init(like=np.zeros(3, "f4"))
    for name in LossScaleState._fields:
        first, second = getattr(one, name), getattr(other, name)
        assert first is not second
        assert not np.shares_memory(first, second)
        assert first.shape == ()
    assert [value.dtype.name for value in one] == ["float32", "int32", "int32", "int32", "int32"]
    assert [value.item() for value in one] == [16.0, 0, 1, 0, 0]


def test_s15_update_changes_nothing_in_place() -> None:
    scaler = LossScaler(init_scale=16.0, growth_interval=1)
    state = scaler.init("reference")
    scaler.update(state, finite=True)
    scaler.update(state, finite=False)
    assert [value.item() for value in state] == [16.0, 0, 1, 0, 0]


def test_init_takes_one_of_its_arguments() -> None:
    both: dict[str, Any] = {"backend": "reference", "like": np.zeros(1)}
    for arguments in ({}, both):
        with pytest.raises(LossScaleError, match=r"either a backend's name, or like=array\. Received: both or neither"):
            LossScaler().init(**arguments)


def test_scale_and_unscale() -> None:
    scaler = LossScaler(init_scale=1024.0)
    state = scaler.init("reference")
    scaled = scaler.scale(np.float16(2.5), state)
    assert (float(scaled), scaled.dtype.name) == (2560.0, "float32")
    grads, finite = scaler.unscale([np.asarray([1024.0], np.float16), None, f32([[2048.0]])], state)
    assert bool(finite)
    assert (grads[0].tolist(), grads[0].dtype.name, grads[1], grads[2].tolist()) == ([1.0], "float32", None, [[2.0]])
    for bad in (np.inf, -np.inf, np.nan):
        assert not bool(scaler.unscale([f32([1.0, bad])], state)[1])


def test_s06_a_sixteen_bit_loss_does_not_overflow() -> None:
    scaler = LossScaler()
    assert float(scaler.scale(np.float16(60000.0), scaler.init("reference"))) == 60000.0 * 2.0**15


def test_s10_the_flag_is_taken_after_unscaling() -> None:
    scaler = LossScaler(init_scale=2.0**-10)
    state = scaler.init("reference")
    scaler.scale(np.float32(1.0), state)
    with np.errstate(over="ignore"):
        _, finite = scaler.unscale([f32([1e38])], state)
    assert not bool(finite)


def test_s07_scale_and_unscale_are_pure_and_keep_no_books() -> None:
    """An equal scaler elsewhere changes nothing: what is divided is what is given."""
    scaler = LossScaler(init_scale=2.0**15)
    state = scaler.init("reference")
    LossScaler(init_scale=2.0**15).scale(np.float32(1.0), state)
    assert scaler.unscale([f32([2.0**15])], state)[0][0].tolist() == [1.0]
    assert float(scaler.scale(scaler.scale(np.float32(1.0), state), state)) == 2.0**30


def test_native_names_what_a_backend_without_an_object_of_its_own_has_instead() -> None:
    with pytest.raises(UnsupportedError, match=r"reference backend .* no loss-scaling object .* Use scaler\.scale"):
        LossScaler().native("reference")

"""Schedules against closed forms, on Python numbers and on NumPy float32 scalars."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyamp import RecipeError, schedules
from polyamp.errors import ArgumentError
from polyamp.reference.arrays import XP
from polyamp.schedules import is_schedule

RATES = st.floats(0.0, 10.0, allow_subnormal=False)
STEPS = st.integers(1, 500)
ORIGINS = st.integers(-3, 0)
SHAPES = st.sampled_from(["1-sqrt", "linear", "cosine"])
ONE: Any = 1
FIVE: Any = 5


@st.composite
def any_schedule(draw: st.DrawFn) -> Any:
    kind = draw(st.integers(0, 13))
    rates, steps = [draw(RATES) for _ in range(3)], sorted(draw(st.tuples(STEPS, STEPS)))
    boundaries = tuple(sorted(draw(st.sets(STEPS, max_size=4))))
    makers: list[Callable[[], Any]] = [
        lambda: schedules.constant(rates[0]),
        lambda: schedules.linear_warmup(rates[0], steps[0], start=rates[1], origin=draw(ORIGINS)),
        lambda: schedules.cosine(rates[0], steps[0], end=rates[1]),
        lambda: schedules.warmup_cosine(
            rates[0],
            warmup_steps=steps[0],
            total_steps=steps[1] + 1,
            start=rates[1],
            end=rates[2],
            origin=draw(ORIGINS),
        ),
        lambda: schedules.step(rates[0], every=steps[0], factor=draw(st.floats(0.0, 1.0, allow_subnormal=False))),
        lambda: schedules.piecewise(tuple(draw(RATES) for _ in range(len(boundaries) + 1)), boundaries=boundaries),
        lambda: schedules.linear(rates[0], steps[0] - 1, steps[1] + 1, rates[1], rates[2], draw(ORIGINS)),
        lambda: schedules.wsd(
            rates[0], steps[0], steps[0] + steps[1], steps[1], rates[1], draw(SHAPES), rates[2], draw(ORIGINS)
        ),
        lambda: schedules.one_cycle(
            rates[0], steps[0] - 0.5, steps[1] + 1, *rates[1:], draw(st.sampled_from(["cosine", "linear"]))
        ),
        lambda: schedules.inverse_sqrt(rates[0], steps[0], draw(st.sampled_from([None, 0.5, 100])), rates[1]),
        lambda: schedules.polynomial(rates[0], steps[0], draw(st.floats(0.25, 4.0)), rates[1]),
        lambda: schedules.exponential(rates[0], draw(st.floats(0.5, 1.0)), steps[0]),
        lambda: schedules.restarts(rates[0], steps[0], draw(st.integers(1, 3)), rates[1], draw(st.floats(0.0, 1.0))),
        lambda: schedules.join(
            [schedules.linear_warmup(rates[0], steps[0]), schedules.cosine(rates[0], steps[1], rates[1])], (steps[0],)
        ),
    ]
    return makers[kind]()


CLOSED_FORMS: list[tuple[Any, Callable[[int], float]]] = [
    (schedules.constant(0.3), lambda _: 0.3),
    (schedules.linear_warmup(2.0, 8, start=0.5), lambda n: 0.5 + 1.5 * n / 8 if n < 8 else 2.0),
    (
        schedules.linear_warmup(2.0, 8, start=0.5, origin=-2),
        lambda n: 0.5 + 1.5 * (n + 2) / 10 if n < 8 else 2.0,
    ),
    (schedules.cosine(2.0, 20, end=0.5), lambda n: 0.5 + 0.75 * (1 + math.cos(math.pi * min(n, 20) / 20))),
    (
        schedules.warmup_cosine(1.0, warmup_steps=5, total_steps=25, start=0.1, end=0.2),
        lambda n: 0.1 + 0.9 * n / 5 if n < 5 else 0.2 + 0.4 * (1 + math.cos(math.pi * min(n - 5, 20) / 20)),
    ),
    (schedules.step(1.0, every=10, factor=0.5), lambda n: 0.5 ** (n // 10)),
    (schedules.piecewise((1.0, 0.5, 0.1), boundaries=(10, 20)), lambda n: 1.0 if n < 10 else 0.5 if n < 20 else 0.1),
    (schedules.piecewise((0.7,), boundaries=()), lambda _: 0.7),
    (schedules.warmup_cosine(2.0, 0, 20), lambda n: 1.0 + math.cos(math.pi * min(n, 20) / 20)),
    (
        schedules.linear(2.0, 4, 24, end=0.5, start=0.2, origin=-1),
        lambda n: 0.2 + 1.8 * (n + 1) / 5 if n < 4 else 2.0 - 1.5 * min(n - 4, 20) / 20,
    ),
    (schedules.linear(0.5, 0, 20, end=2.0), lambda n: 0.5 + 1.5 * min(n, 20) / 20),
    *[
        (
            schedules.wsd(2.0, 4, 32, 16, end=0.5, shape=shape, start=0.1),  # type: ignore[arg-type]  # one of its words
            lambda n, f=f: 0.1 + 1.9 * n / 4 if n < 4 else 2.0 if n < 16 else 0.5 + 1.5 * f(min(n - 16, 16) / 16),
        )
        for shape, f in (
            ("1-sqrt", lambda p: 1.0 - math.sqrt(p)),
            ("linear", lambda p: 1.0 - p),
            ("cosine", lambda p: 0.5 + 0.5 * math.cos(math.pi * p)),
        )
    ],
    (schedules.wsd(2.0, 0, 10, 10, shape="linear"), lambda n: 2.0 - 0.2 * min(n, 10)),
    (
        schedules.inverse_sqrt(2.0, 4, start=0.4),
        lambda n: 0.4 + 1.6 * n / 4 if n < 4 else 2.0 * math.sqrt(4 / n),
    ),
    (schedules.inverse_sqrt(2.0, 0, 9.0), lambda n: 2.0 * math.sqrt(9 / (n + 9))),
    (schedules.polynomial(2.0, 20, 3.0, 0.5), lambda n: 0.5 + 1.5 * (1 - min(n, 20) / 20) ** 3),
    (schedules.exponential(2.0, 0.5, 8), lambda n: 2.0 * 0.5 ** (n / 8)),
    (schedules.restarts(2.0, 8, 1, 0.5, 0.5), lambda n: 0.5 + 1.5 * 0.5 ** (n // 8) * cosine_of((n % 8) / 8)),
    (
        schedules.restarts(2.0, 4, 3, 0.5, 0.5),  # cycles from 0, 4 and 16 on
        lambda n: (
            0.5
            + 1.5
            * (
                cosine_of(n / 4)
                if n < 4
                else 0.5 * cosine_of((n - 4) / 12)
                if n < 16
                else 0.25 * cosine_of((n - 16) / 36)
            )
        ),
    ),
    (
        schedules.join(
            [schedules.constant(0.5), schedules.inverse_sqrt(2.0, 0, 1.0), schedules.constant(0.1)], [3, 30]
        ),
        lambda n: 0.5 if n < 3 else 2.0 / math.sqrt(n - 2) if n < 30 else 0.1,
    ),
    (
        schedules.one_cycle(2.0, 7.5, 30, 0.5, 0.1),
        lambda n: 2.0 - 1.5 * cosine_of(n / 7.5) if n < 7.5 else 0.1 + 1.9 * cosine_of(min(n - 7.5, 22.5) / 22.5),
    ),
    (
        schedules.one_cycle(2.0, 10, 40, shape="linear"),
        lambda n: 0.08 + 1.92 * n / 10 if n < 10 else 2.0 - (2.0 - 8e-6) * min(n - 10, 30) / 30,
    ),
]


def cosine_of(share: float) -> float:
    """Half a cosine from 1 to 0."""
    return 0.5 + 0.5 * math.cos(math.pi * share)


@pytest.mark.parametrize(("schedule", "closed"), CLOSED_FORMS, ids=lambda value: type(value).__name__)
def test_closed_forms(schedule: Any, closed: Callable[[int], float]) -> None:
    for count in range(41):
        rate = schedule(count)
        assert isinstance(rate, float)
        assert rate == pytest.approx(closed(count), rel=1e-12, abs=1e-15)


@given(any_schedule(), st.integers(0, 1200))
def test_numpy_gives_the_same_rate_in_float32(schedule: Any, count: int) -> None:
    rate = schedule(np.float32(count), XP)
    assert rate.dtype == np.float32
    assert np.ndim(rate) == 0
    assert float(rate) == pytest.approx(schedule(count), rel=1e-4, abs=1e-5)


@given(any_schedule(), st.integers(0, 1200))
def test_rates_are_finite_and_pure(schedule: Any, count: int) -> None:
    rate = schedule(count)
    assert math.isfinite(rate)
    assert rate >= 0.0
    assert schedule(count) == rate == pickle.loads(pickle.dumps(schedule))(count)
    assert hash(schedule) == hash(pickle.loads(pickle.dumps(schedule)))
    assert is_schedule(schedule)


def test_ends() -> None:
    schedule = schedules.warmup_cosine(1.0, warmup_steps=10, total_steps=100, end=0.25)
    assert [schedule(0), schedule(10), schedule(100), schedule(10**6)] == [0.0, 1.0, 0.25, 0.25]
    assert schedules.linear_warmup(0.3, 7)(7) == 0.3
    assert schedules.step(1.0, every=3, factor=0.0)(2) == 1.0
    assert schedules.step(1.0, every=3, factor=0.0)(3) == 0.0


def nanogpt_rate(count: int, peak: float, warmup_steps: int, total_steps: int, end: float) -> float:
    """`get_lr` of github.com/karpathy/nanoGPT, train.py, with its globals as arguments: `learning_rate`,
    `warmup_iters`, `lr_decay_iters` and `min_lr`. The first update is `count` 0."""
    if count < warmup_steps:
        return peak * (count + 1) / (warmup_steps + 1)
    if count > total_steps:
        return end
    decay_ratio = (count - warmup_steps) / (total_steps - warmup_steps)
    return end + 0.5 * (1.0 + math.cos(math.pi * decay_ratio)) * (peak - end)


@pytest.mark.parametrize(("warmup_steps", "total_steps"), [(5, 60), (1, 2), (2000, 600_000)])
def test_s13_a_warmup_from_one_update_before_the_first_is_nanogpts(warmup_steps: int, total_steps: int) -> None:
    schedule = schedules.warmup_cosine(6e-4, warmup_steps, total_steps, end=6e-5, origin=-1)
    counts = sorted({*range(12), warmup_steps - 1, warmup_steps, warmup_steps + 1, total_steps - 1, total_steps})
    for count in (*counts, total_steps + 1, 2 * total_steps):
        expected = nanogpt_rate(count, 6e-4, warmup_steps, total_steps, 6e-5)
        assert schedule(count) == pytest.approx(expected, rel=1e-13)
        on_device = schedule(np.float32(count), XP)
        assert on_device.dtype == np.float32
        assert float(on_device) == pytest.approx(expected, rel=1e-6)
    if warmup_steps > 1:
        line = schedules.linear_warmup(6e-4, warmup_steps, origin=-1)
        assert [line(count) for count in range(5)] == [schedule(count) for count in range(5)]


@pytest.mark.parametrize("origin", [0, -1, -3])
def test_s13_a_warmup_has_its_start_at_its_origin_and_its_peak_after_its_steps(origin: int) -> None:
    """The two points that the documentation names; with an origin of 0 the bits are those of the plain line."""
    for schedule in (
        schedules.linear_warmup(2.0, 6, start=0.5, origin=origin),
        schedules.warmup_cosine(2.0, 6, 30, start=0.5, origin=origin),
    ):
        assert schedule(origin) == 0.5
        assert schedule(0) == (0.5 if origin == 0 else 0.5 + 1.5 * -origin / (6 - origin))
        assert schedule(5) < 2.0 == schedule(6)
    assert schedules.linear_warmup(2.0, 6, start=0.5)(5) == 0.5 + 1.5 * (5.0 / 6)


@pytest.mark.parametrize("value", [1, -1.0, True, None, "first"])
def test_s20_an_impossible_origin_is_refused(value: Any) -> None:
    for make in (schedules.linear_warmup(1.0, 3).replace, schedules.warmup_cosine(1.0, 1, 3).replace):
        with pytest.raises(RecipeError, match=r"origin must be 0 .*or a negative integer .*Received: origin="):
            make(origin=value)


def test_lists_become_tuples() -> None:
    listed = schedules.piecewise([1.0, 0.5], boundaries=[10])  # type: ignore[arg-type]
    assert listed == schedules.piecewise((1.0, 0.5), boundaries=(10,))
    assert hash(listed) == hash(schedules.piecewise((1.0, 0.5), boundaries=(10,)))


NOT_A_RATE = r"{name} must be a finite number of at least 0\. Received: {name}="
NOT_STEPS = r"{name} must be an integer of at least 1\. Received: {name}="


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, True, "1", None])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda v: schedules.constant(v), "value"),
        (lambda v: schedules.linear_warmup(v, 3), "peak"),
        (lambda v: schedules.linear_warmup(1.0, 3, start=v), "start"),
        (lambda v: schedules.cosine(v, 3), "peak"),
        (lambda v: schedules.cosine(1.0, 3, end=v), "end"),
        (lambda v: schedules.warmup_cosine(v, 1, 3), "peak"),
        (lambda v: schedules.warmup_cosine(1.0, 1, 3, start=v), "start"),
        (lambda v: schedules.warmup_cosine(1.0, 1, 3, end=v), "end"),
        (lambda v: schedules.step(v, 3), "initial"),
        (lambda v: schedules.step(1.0, 3, factor=v), "factor"),
        (lambda v: schedules.piecewise((1.0, v), (3,)), "values"),
        (lambda v: schedules.linear(v, 1, 3), "peak"),
        (lambda v: schedules.linear(1.0, 1, 3, v), "end"),
        (lambda v: schedules.wsd(v, 1, 3, 1), "peak"),
        (lambda v: schedules.wsd(1.0, 1, 3, 1, start=v), "start"),
        (lambda v: schedules.inverse_sqrt(v, 3), "peak"),
        (lambda v: schedules.polynomial(v, 3), "peak"),
        (lambda v: schedules.polynomial(1.0, 3, end=v), "end"),
        (lambda v: schedules.exponential(v, 0.5), "initial"),
        (lambda v: schedules.restarts(v, 3), "peak"),
        (lambda v: schedules.restarts(1.0, 3, peak_factor=v), "peak_factor"),
        (lambda v: schedules.one_cycle(v, 1, 3), "peak"),
    ],
)
def test_impossible_rates_are_refused(make: Callable[[Any], Any], name: str, value: Any) -> None:
    with pytest.raises(RecipeError, match=NOT_A_RATE.format(name=name)):
        make(value)


@pytest.mark.parametrize("value", [0, -1, 2.0, True, None])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda v: schedules.linear_warmup(1.0, v), "steps"),
        (lambda v: schedules.cosine(1.0, v), "steps"),
        (lambda v: schedules.warmup_cosine(1.0, 1, v), "total_steps"),
        (lambda v: schedules.linear(1.0, 1, v), "total_steps"),
        (lambda v: schedules.wsd(1.0, 1, 30, v), "decay_steps"),
        (lambda v: schedules.polynomial(1.0, v), "steps"),
        (lambda v: schedules.exponential(1.0, 0.5, v), "every"),
        (lambda v: schedules.restarts(1.0, v), "steps"),
        (lambda v: schedules.restarts(1.0, 3, v), "factor"),
        (lambda v: schedules.join([schedules.constant(1.0), schedules.constant(1.0)], [v]), "boundaries"),
        (lambda v: schedules.step(1.0, v), "every"),
        (lambda v: schedules.piecewise((1.0, 0.5), (v,)), "boundaries"),
    ],
)
def test_impossible_step_counts_are_refused(make: Callable[[Any], Any], name: str, value: Any) -> None:
    with pytest.raises(RecipeError, match=NOT_STEPS.format(name=name)):
        make(value)


@pytest.mark.parametrize("value", [-1, 2.0, True, None])
@pytest.mark.parametrize("kind", ["warmup_cosine", "linear", "inverse_sqrt"])
def test_impossible_warmups_are_refused(kind: str, value: Any) -> None:
    with pytest.raises(RecipeError, match=r"warmup_steps must be an integer of at least 0\. Received: warmup_steps="):
        getattr(schedules, kind)(1.0, value, 3)


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, True, "1"])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda v: schedules.polynomial(1.0, 3, v), "power"),
        (lambda v: schedules.exponential(1.0, v), "factor"),
        (lambda v: schedules.inverse_sqrt(1.0, 3, v), "timescale"),
        (lambda v: schedules.one_cycle(1.0, v, 3), "warmup_steps"),
    ],
)
def test_what_must_be_above_0_is(make: Callable[[Any], Any], name: str, value: Any) -> None:
    with pytest.raises(RecipeError, match=rf"{name} must be a finite number above 0\. Received: {name}="):
        make(value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.linear(1.0, 5, 5), r"total_steps must exceed warmup_steps=5\. .*total_steps=5"),
        (lambda: schedules.wsd(1.0, 5, 10, 6), r"total_steps must hold warmup and decay, 5 \+ 6 updates\. .*steps=10"),
        (
            lambda: schedules.wsd(1.0, 5, 10, 5, shape="sqrt"),
            r"shape must be one of '1-sqrt', .* Received: shape='sqrt'",
        ),  # type: ignore[arg-type]
        (lambda: schedules.inverse_sqrt(1.0, 0), r"timescale must be a finite number above 0\. Received: timescale=0"),
        (lambda: schedules.join([schedules.constant(1.0)], [3]), r"one more schedule than boundaries\. .*1 schedules"),
        (lambda: schedules.join([schedules.constant(1.0)] * 3, [5, 3]), r"strictly increasing boundaries"),
        (lambda: schedules.join([0.1, schedules.constant(1.0)], [3]), r"schedules of polyamp other than join\. .*0\.1"),  # type: ignore[list-item]
        (
            lambda: schedules.join([schedules.join([schedules.constant(1.0)], []), schedules.constant(1.0)], [3]),  # type: ignore[list-item]
            r"other than join",
        ),
        (lambda: schedules.join(ONE, [3]), r"schedules must be a list\. Received: schedules=1"),
        (lambda: schedules.warmup_cosine(1.0, 5, 5), r"total_steps must exceed warmup_steps=5\. .*total_steps=5"),
        (lambda: schedules.piecewise((1.0,), (3,)), r"one more value than boundaries\. Received: values=\(1\.0,\)"),
        (lambda: schedules.piecewise((1.0, 2.0, 3.0), (5, 3)), r"strictly increasing boundaries .*boundaries=\(5, 3\)"),
        (lambda: schedules.piecewise((1.0, 2.0, 3.0), (5, 5)), r"strictly increasing boundaries"),
        (
            lambda: schedules.piecewise(ONE, (5,)),
            r"values must be a tuple of numbers\. Received: values=1\.",
        ),
        (
            lambda: schedules.piecewise((1.0, 2.0), FIVE),
            r"boundaries must be a tuple of numbers\. Received: boundaries=5",
        ),
    ],
)
def test_contradictions_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make()


def test_a_cycle_ends_at_its_update_up_to_the_largest_count() -> None:
    schedule, begin, length = schedules.restarts(1.0, 3, 2), 0, 3
    while begin + length < 2**24:  # the integers that float32 has
        begin, length = begin + length, length * 2
        assert schedule(begin) == schedule(np.float32(begin), XP) == 1.0
        assert schedule(begin - 1) < 1.0
        assert schedule(np.float32(begin - 1), XP) < 1.0


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("torch.OneCycle", {}, r"like\(\) knows torch\.ConstantLR, .*Did you mean 'torch\.OneCycleLR'"),
        ("torch.OneCycleLR", {"max_lr": 1.0, "total_steps": 9}, r"cycle_momentum=True: torch moves the momentum, too"),
        (
            "torch.OneCycleLR",
            {"max_lr": 1.0, "cycle_momentum": False, "three_phase": True},
            "three_phase=True: a cycle",
        ),
        (
            "optax.exponential_decay",
            {"init_value": 1.0, "transition_steps": 3, "decay_rate": 0.5, "end_value": 0.1},
            "end_value=0.1: an exponential decay of polyamp's has no end",
        ),
        (
            "keras.CosineDecayRestarts",
            {"initial_learning_rate": 1.0, "first_decay_steps": 3, "t_mul": 1.5},
            "t_mul=1.5",
        ),
        (
            "transformers.get_wsd_schedule",
            {"lr": 1.0, "num_warmup_steps": 1, "num_decay_steps": 1, "num_training_steps": 9, "warmup_type": "cosine"},
            "warmup_type='cosine': a warmup of polyamp's is a straight",
        ),
    ],
)
def test_s20_what_polyamp_cannot_say_of_a_library_is_refused(
    name: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        schedules.like(name, **arguments)


def test_s20_a_librarys_arguments_are_named() -> None:
    with pytest.raises(
        ArgumentError, match=r"like\('torch\.StepLR', \.\.\.\) has the arguments lr, step_size, gamma\. Rec"
    ):
        schedules.like("torch.StepLR", lr=1.0, step=3)


def test_a_cosine_may_have_begun_before_its_first_update() -> None:
    late, whole = schedules.cosine(1.0, 6, 0.1, origin=-4), schedules.cosine(1.0, 10, 0.1)
    assert [late(count) for count in range(9)] == pytest.approx([whole(count + 4) for count in range(9)], abs=1e-15)
    assert schedules.cosine(1.0, 6, origin=0) == schedules.cosine(1.0, 6)
    with pytest.raises(RecipeError, match=r"origin must be 0 .*Received: origin=2"):
        schedules.cosine(1.0, 6, origin=2)

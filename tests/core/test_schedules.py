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
from polyamp.reference.arrays import XP
from polyamp.schedules import is_schedule

RATES = st.floats(0.0, 10.0, allow_subnormal=False)
STEPS = st.integers(1, 500)
ORIGINS = st.integers(-3, 0)
ONE: Any = 1
FIVE: Any = 5


@st.composite
def any_schedule(draw: st.DrawFn) -> Any:
    kind = draw(st.integers(0, 5))
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
]


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
        (lambda v: schedules.warmup_cosine(1.0, v, 3), "warmup_steps"),
        (lambda v: schedules.warmup_cosine(1.0, 1, v), "total_steps"),
        (lambda v: schedules.step(1.0, v), "every"),
        (lambda v: schedules.piecewise((1.0, 0.5), (v,)), "boundaries"),
    ],
)
def test_impossible_step_counts_are_refused(make: Callable[[Any], Any], name: str, value: Any) -> None:
    with pytest.raises(RecipeError, match=NOT_STEPS.format(name=name)):
        make(value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
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

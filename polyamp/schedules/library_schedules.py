"""Schedules of torch, optax, Keras and transformers as schedules of polyamp: `schedules.like`.

One function per library schedule, with the library's own parameters and defaults, so that its call can be copied. What
no schedule of polyamp's does is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from polyamp.errors import ArgumentError, RecipeError, did_you_mean
from polyamp.schedules import combinations, decays, warmups
from polyamp.schedules.schedule_base import ScheduleBase

LIBRARY_SCHEDULES: Final[dict[str, Callable[..., Any]]] = {}
"""Name -> function that makes the schedule."""


def schedule_of_library(name: str, arguments: Mapping[str, Any]) -> Any:
    """Return the schedule that `schedules.like` describes."""
    if name not in LIBRARY_SCHEDULES:
        hint = did_you_mean(name, LIBRARY_SCHEDULES)
        raise RecipeError(f"like() knows {', '.join(LIBRARY_SCHEDULES)}. Received: {name!r}.{hint}")
    make = LIBRARY_SCHEDULES[name]
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        parameters = ", ".join(inspect.signature(make).parameters)
        raise ArgumentError(f"like({name!r}, ...) has the arguments {parameters}. Received: {error}.") from error
    return make(**arguments)


def _library(prefix: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function under a name: the library's prefix and the function's name after its first underscore."""

    def enter(make: Callable[..., Any]) -> Callable[..., Any]:
        LIBRARY_SCHEDULES[prefix + make.__name__.removeprefix("_")] = make
        return make

    return enter


def _refuse(argument: str, value: Any, why: str) -> RecipeError:
    return RecipeError(f"{argument}={value!r}: {why}")


# torch.optim.lr_scheduler. The rate is the optimizer's: `lr`.


@_library("torch.")
def _ConstantLR(lr: float, factor: float = 1.0 / 3, total_iters: int = 5) -> ScheduleBase:
    return decays.piecewise((lr * factor, lr), boundaries=(total_iters,))


@_library("torch.")
def _LinearLR(lr: float, start_factor: float = 1.0 / 3, end_factor: float = 1.0, total_iters: int = 5) -> ScheduleBase:
    return warmups.linear(lr * start_factor, 0, total_iters, end=lr * end_factor)


@_library("torch.")
def _StepLR(lr: float, step_size: int, gamma: float = 0.1) -> ScheduleBase:
    return decays.step(lr, step_size, gamma)


@_library("torch.")
def _MultiStepLR(lr: float, milestones: Sequence[int], gamma: float = 0.1) -> ScheduleBase:
    boundaries = sorted(set(milestones))
    passed = [sum(milestone <= boundary for milestone in milestones) for boundary in boundaries]
    return decays.piecewise((lr, *(lr * gamma**count for count in passed)), tuple(boundaries))


@_library("torch.")
def _ExponentialLR(lr: float, gamma: float) -> ScheduleBase:
    return decays.exponential(lr, gamma)


@_library("torch.")
def _PolynomialLR(lr: float, total_iters: int = 5, power: float = 1.0) -> ScheduleBase:
    return decays.polynomial(lr, total_iters, float(power))


@_library("torch.")
def _CosineAnnealingLR(lr: float, T_max: int, eta_min: float = 0.0) -> ScheduleBase:  # noqa: N803  # torch's
    """Up to `T_max`; from there torch rises again, and polyamp stays at `eta_min`."""
    return decays.cosine(lr, T_max, eta_min)


@_library("torch.")
def _CosineAnnealingWarmRestarts(
    lr: float,
    T_0: int,  # noqa: N803  # torch's
    T_mult: int = 1,  # noqa: N803  # torch's
    eta_min: float = 0.0,
) -> ScheduleBase:
    return decays.restarts(lr, T_0, T_mult, eta_min)


@_library("torch.")
def _OneCycleLR(
    max_lr: float,
    total_steps: int | None = None,
    epochs: int | None = None,
    steps_per_epoch: int | None = None,
    pct_start: float = 0.3,
    anneal_strategy: str = "cos",
    cycle_momentum: bool = True,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    three_phase: bool = False,
) -> ScheduleBase:
    if cycle_momentum:
        raise _refuse(
            "cycle_momentum",
            True,
            "torch moves the momentum, too, and a recipe's is a number. Say cycle_momentum=False.",
        )
    if three_phase:
        raise _refuse("three_phase", True, "a cycle of polyamp's has two phases. Write it with schedules.join.")
    total = total_steps if total_steps is not None else (epochs or 0) * (steps_per_epoch or 0)
    start = max_lr / div_factor
    shape = {"cos": "cosine"}.get(anneal_strategy, anneal_strategy)
    return warmups.one_cycle(max_lr, pct_start * total - 1, total - 1, start, start / final_div_factor, shape)  # type: ignore[arg-type]  # checked there


# optax's functions.


def _after(begin: int, initial: float, schedule: Any) -> ScheduleBase:
    """Return a schedule that begins after a constant rate."""
    return combinations.join([decays.constant(initial), schedule], (begin,)) if begin > 0 else schedule


@_library("optax.")
def _constant_schedule(value: float) -> ScheduleBase:
    return decays.constant(value)


@_library("optax.")
def _linear_schedule(
    init_value: float, end_value: float, transition_steps: int, transition_begin: int = 0
) -> ScheduleBase:
    return _after(transition_begin, init_value, warmups.linear(init_value, 0, transition_steps, end=end_value))


@_library("optax.")
def _polynomial_schedule(
    init_value: float, end_value: float, power: float, transition_steps: int, transition_begin: int = 0
) -> ScheduleBase:
    falling = decays.polynomial(init_value, transition_steps, float(power), end_value)
    return _after(transition_begin, init_value, falling)


@_library("optax.")
def _exponential_decay(
    init_value: float,
    transition_steps: int,
    decay_rate: float,
    transition_begin: int = 0,
    staircase: bool = False,
    end_value: float | None = None,
) -> ScheduleBase:
    if end_value is not None:
        raise _refuse("end_value", end_value, "an exponential decay of polyamp's has no end. Leave it out.")
    stairs = decays.step(init_value, transition_steps, decay_rate)
    return _after(
        transition_begin,
        init_value,
        stairs if staircase else decays.exponential(init_value, decay_rate, transition_steps),
    )


def _check_exponent(exponent: float) -> None:
    if exponent != 1.0:
        raise _refuse("exponent", exponent, "a cosine of polyamp's has no exponent. Leave it out.")


@_library("optax.")
def _cosine_decay_schedule(
    init_value: float, decay_steps: int, alpha: float = 0.0, exponent: float = 1.0
) -> ScheduleBase:
    _check_exponent(exponent)
    return decays.cosine(init_value, decay_steps, alpha * init_value)


@_library("optax.")
def _warmup_constant_schedule(init_value: float, peak_value: float, warmup_steps: int) -> ScheduleBase:
    return warmups.linear_warmup(peak_value, warmup_steps, init_value)


@_library("optax.")
def _warmup_cosine_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    decay_steps: int,
    end_value: float = 0.0,
    exponent: float = 1.0,
) -> ScheduleBase:
    _check_exponent(exponent)
    return warmups.warmup_cosine(peak_value, warmup_steps, decay_steps, init_value, end_value)


@_library("optax.")
def _piecewise_constant_schedule(
    init_value: float, boundaries_and_scales: Mapping[int, float] | None = None
) -> ScheduleBase:
    values = [init_value]
    boundaries = sorted(boundaries_and_scales or {})
    for boundary in boundaries:
        values.append(values[-1] * (boundaries_and_scales or {})[boundary])
    return decays.piecewise(tuple(values), tuple(boundaries))


@_library("optax.")
def _cosine_onecycle_schedule(
    transition_steps: int,
    peak_value: float,
    pct_start: float = 0.3,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
) -> ScheduleBase:
    start = peak_value / div_factor
    return warmups.one_cycle(
        peak_value, int(pct_start * transition_steps), transition_steps, start, start / final_div_factor
    )


# Keras's classes.


@_library("keras.")
def _CosineDecay(
    initial_learning_rate: float,
    decay_steps: int,
    alpha: float = 0.0,
    warmup_target: float | None = None,
    warmup_steps: int = 0,
) -> ScheduleBase:
    if warmup_target is None:
        return decays.cosine(initial_learning_rate, decay_steps, alpha * initial_learning_rate)
    total, end = warmup_steps + decay_steps, alpha * warmup_target
    return warmups.warmup_cosine(warmup_target, warmup_steps, total, initial_learning_rate, end)


@_library("keras.")
def _CosineDecayRestarts(
    initial_learning_rate: float, first_decay_steps: int, t_mul: float = 2.0, m_mul: float = 1.0, alpha: float = 0.0
) -> ScheduleBase:
    if t_mul != int(t_mul):
        raise _refuse("t_mul", t_mul, "cycles of polyamp's grow by an integer, so that each ends at an update.")
    return decays.restarts(
        initial_learning_rate, first_decay_steps, int(t_mul), alpha * initial_learning_rate, float(m_mul)
    )


@_library("keras.")
def _ExponentialDecay(
    initial_learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False
) -> ScheduleBase:
    kind = decays.step if staircase else decays.exponential
    return kind(initial_learning_rate, every=decay_steps, factor=decay_rate)


@_library("keras.")
def _PolynomialDecay(
    initial_learning_rate: float,
    decay_steps: int,
    end_learning_rate: float = 0.0001,
    power: float = 1.0,
    cycle: bool = False,
) -> ScheduleBase:
    if cycle:
        raise _refuse("cycle", True, "a polynomial of polyamp's does not begin again. Leave it out.")
    return decays.polynomial(initial_learning_rate, decay_steps, float(power), end_learning_rate)


@_library("keras.")
def _PiecewiseConstantDecay(boundaries: Sequence[int], values: Sequence[float]) -> ScheduleBase:
    """A boundary is the last count of its value in Keras, and the first of the next one in polyamp."""
    return decays.piecewise(tuple(values), tuple(boundary + 1 for boundary in boundaries))


# transformers' functions. The rate is the optimizer's: `lr`.


@_library("transformers.")
def _get_constant_schedule_with_warmup(lr: float, num_warmup_steps: int) -> ScheduleBase:
    return warmups.linear_warmup(lr, num_warmup_steps)


@_library("transformers.")
def _get_linear_schedule_with_warmup(lr: float, num_warmup_steps: int, num_training_steps: int) -> ScheduleBase:
    return warmups.linear(lr, num_warmup_steps, num_training_steps)


def _check_cycles(num_cycles: float) -> None:
    if num_cycles != 0.5:
        raise _refuse("num_cycles", num_cycles, "a cosine of polyamp's is half a wave. Leave it out.")


@_library("transformers.")
def _get_cosine_schedule_with_warmup(
    lr: float, num_warmup_steps: int, num_training_steps: int, num_cycles: float = 0.5
) -> ScheduleBase:
    _check_cycles(num_cycles)
    return warmups.warmup_cosine(lr, num_warmup_steps, num_training_steps)


@_library("transformers.")
def _get_cosine_with_min_lr_schedule_with_warmup(
    lr: float,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> ScheduleBase:
    _check_cycles(num_cycles)
    end = min_lr if min_lr is not None else lr * (min_lr_rate or 0.0)
    return warmups.warmup_cosine(lr, num_warmup_steps, num_training_steps, end=end)


@_library("transformers.")
def _get_polynomial_decay_schedule_with_warmup(
    lr: float, num_warmup_steps: int, num_training_steps: int, lr_end: float = 1e-7, power: float = 1.0
) -> ScheduleBase:
    falling = decays.polynomial(lr, num_training_steps - num_warmup_steps, float(power), lr_end)
    if not num_warmup_steps:
        return falling
    return combinations.join([warmups.linear_warmup(lr, num_warmup_steps), falling], (num_warmup_steps,))


@_library("transformers.")
def _get_inverse_sqrt_schedule(lr: float, num_warmup_steps: int, timescale: float | None = None) -> ScheduleBase:
    return warmups.inverse_sqrt(lr, num_warmup_steps, timescale or num_warmup_steps or 10_000)


@_library("transformers.")
def _get_wsd_schedule(
    lr: float,
    num_warmup_steps: int,
    num_decay_steps: int,
    num_training_steps: int | None = None,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> ScheduleBase:
    _check_cycles(num_cycles)
    if warmup_type != "linear":
        raise _refuse("warmup_type", warmup_type, "a warmup of polyamp's is a straight line. Say warmup_type='linear'.")
    if num_stable_steps is not None:
        num_training_steps = num_warmup_steps + num_stable_steps + num_decay_steps
    if num_training_steps is None:
        raise ArgumentError("like('transformers.get_wsd_schedule', ...) needs num_training_steps or num_stable_steps.")
    low = lr * min_lr_ratio
    return warmups.wsd(lr, num_warmup_steps, num_training_steps, num_decay_steps, low, decay_type, start=low)  # type: ignore[arg-type]  # checked there

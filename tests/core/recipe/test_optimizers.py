"""Optimizer specs: PyTorch's defaults, and its documented formulas written again in plain float64 NumPy."""

from __future__ import annotations

import inspect
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polyamp import (
    RecipeError,
    adafactor,
    adagrad,
    adam,
    adamw,
    lamb,
    lion,
    muon,
    nadam,
    nadamw,
    rmsprop,
    schedule_free,
    schedules,
    sgd,
)
from polyamp.array_namespace import PYTHON
from polyamp.recipe.optimizers import SPECS, is_spec
from polyamp.reference.arrays import XP
from polyamp.schedules.library_schedules import LIBRARY_SCHEDULES

Array = np.ndarray[Any, np.dtype[np.float64]]
Oracle = Callable[[Array, list[Array], float], Array]
STEPS = 30
RATE = 0.03
ONE: Any = 1
YES: Any = "yes"


def torch_sgd(
    param: Array, grads: list[Array], lr: float, *, momentum: float = 0.0, decay: float = 0.0, nesterov: bool = False
) -> Array:
    buffer: Array | None = None
    for grad in grads:
        g = grad + decay * param
        if momentum:
            buffer = g if buffer is None else momentum * buffer + g
            g = g + momentum * buffer if nesterov else buffer
        param = param - lr * g
    return param


def torch_adam(
    param: Array,
    grads: list[Array],
    lr: float,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    decay: float = 0.0,
    decoupled: bool = False,
    amsgrad: bool = False,
) -> Array:
    m, v, largest = np.zeros_like(param), np.zeros_like(param), np.zeros_like(param)
    for t, grad in enumerate(grads, start=1):
        g = grad
        if decoupled:
            param = param - lr * decay * param
        else:
            g = grad + decay * param
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        largest = np.maximum(largest, v)
        m_hat, v_hat = m / (1 - betas[0] ** t), (largest if amsgrad else v) / (1 - betas[1] ** t)
        param = param - lr * m_hat / (np.sqrt(v_hat) + eps)
    return param


def torch_nadam(
    param: Array,
    grads: list[Array],
    lr: float,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    decay: float = 0.0,
    momentum_decay: float = 4e-3,
    decoupled: bool = False,
) -> Array:
    m, v, product = np.zeros_like(param), np.zeros_like(param), 1.0
    for t, grad in enumerate(grads, start=1):
        g = grad
        if decoupled:
            param = param - lr * decay * param
        else:
            g = grad + decay * param
        mu = betas[0] * (1 - 0.5 * 0.96 ** (t * momentum_decay))
        mu_next = betas[0] * (1 - 0.5 * 0.96 ** ((t + 1) * momentum_decay))
        product *= mu
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        denominator = np.sqrt(v / (1 - betas[1] ** t)) + eps
        param = param - lr * (1 - mu) / (1 - product) * g / denominator
        param = param - lr * mu_next / (1 - product * mu_next) * m / denominator
    return param


def torch_rmsprop(
    param: Array,
    grads: list[Array],
    lr: float,
    *,
    alpha: float = 0.99,
    eps: float = 1e-8,
    decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
) -> Array:
    v, buffer, average = np.zeros_like(param), np.zeros_like(param), np.zeros_like(param)
    for grad in grads:
        g = grad + decay * param
        v = alpha * v + (1 - alpha) * g**2
        spread = v
        if centered:
            average = average * alpha + (1 - alpha) * g
            spread = v - average**2
        if momentum > 0:
            buffer = momentum * buffer + g / (np.sqrt(spread) + eps)
            param = param - lr * buffer
        else:
            param = param - lr * g / (np.sqrt(spread) + eps)
    return param


def torch_adagrad(
    param: Array,
    grads: list[Array],
    lr: float,
    *,
    lr_decay: float = 0.0,
    decay: float = 0.0,
    start: float = 0.0,
    eps: float = 1e-10,
) -> Array:
    total = np.full_like(param, start)
    for t, grad in enumerate(grads, start=1):
        g = grad + decay * param
        total = total + g**2
        param = param - lr / (1 + (t - 1) * lr_decay) * g / (np.sqrt(total) + eps)
    return param


def paper_lion(
    param: Array, grads: list[Array], lr: float, *, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.0
) -> Array:
    m = np.zeros_like(param)
    for grad in grads:
        direction = np.sign(betas[0] * m + (1 - betas[0]) * grad)
        m = betas[1] * m + (1 - betas[1]) * grad
        param = param - lr * (direction + decay * param)
    return param


def paper_lamb(
    param: Array,
    grads: list[Array],
    lr: float,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    decay: float = 0.01,
) -> Array:
    m, v = np.zeros_like(param), np.zeros_like(param)
    for t, grad in enumerate(grads, start=1):
        m = betas[0] * m + (1 - betas[0]) * grad
        v = betas[1] * v + (1 - betas[1]) * grad**2
        step = m / (1 - betas[0] ** t) / (np.sqrt(v / (1 - betas[1] ** t)) + eps) + decay * param
        param = param - lr * np.linalg.norm(param) / np.linalg.norm(step) * step
    return param


def torch_adafactor(
    param: Array,
    grads: list[Array],
    lr: float,
    *,
    power: float = -0.8,
    eps: tuple[float, float] = (2.0**-23, 1e-3),
    d: float = 1.0,
    decay: float = 0.0,
) -> Array:
    rows, columns = np.zeros((len(param), 1)), np.zeros((1, param.shape[1]))
    for t, grad in enumerate(grads, start=1):
        share = t**power
        alpha = max(eps[1], float(np.sqrt(np.mean(param**2)))) * min(lr, 1 / math.sqrt(t))
        param = param * (1 - lr * decay)
        rows = (1 - share) * rows + share * np.mean(grad**2, 1, keepdims=True)
        columns = (1 - share) * columns + share * np.mean(grad**2, 0, keepdims=True)
        estimate = rows @ columns / max(float(rows.mean()), eps[0])
        step = grad / np.maximum(np.sqrt(estimate), eps[0])
        param = param - alpha * step / max(1.0, float(np.sqrt(np.mean(step**2))) / d)
    return param


def torch_muon(
    param: Array,
    grads: list[Array],
    lr: float,
    *,
    momentum: float = 0.95,
    decay: float = 0.1,
    nesterov: bool = True,
    factor: float = math.sqrt(5 / 4),
) -> Array:
    buffer = np.zeros_like(param)
    for grad in grads:
        buffer = momentum * buffer + (1 - momentum) * grad
        x = (momentum * buffer + (1 - momentum) * grad if nesterov else buffer).T
        x = x / np.linalg.norm(x)
        for _ in range(5):
            x = 3.4445 * x - 4.775 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
        param = param * (1 - lr * decay) - lr * factor * x.T
    return param


def paper_schedule_free(
    param: Array,
    grads: list[Array],
    lr: float,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    decay: float = 0.0,
) -> Array:
    x, y, z, v, total = param, param, param, np.zeros_like(param), 0.0
    for t, grad in enumerate(grads, start=1):
        v = betas[1] * v + (1 - betas[1]) * grad**2
        z = z - lr * (grad / (np.sqrt(v / (1 - betas[1] ** t)) + eps) + decay * y)
        total += lr**2
        x = x + lr**2 / total * (z - x)
        y = (1 - betas[0]) * z + betas[0] * x
    return y


def f32(values: Any) -> np.ndarray[Any, Any]:
    return np.asarray(values, np.float32)


def partial(oracle: Callable[..., Array], **settings: Any) -> Oracle:
    return lambda param, grads, lr: oracle(param, grads, lr, **settings)


CASES: list[tuple[str, Any, Oracle]] = [
    ("sgd", sgd(RATE), torch_sgd),
    ("sgd decay", sgd(RATE, weight_decay=0.1), partial(torch_sgd, decay=0.1)),
    ("sgd momentum", sgd(RATE, momentum=0.9, weight_decay=0.1), partial(torch_sgd, momentum=0.9, decay=0.1)),
    ("sgd nesterov", sgd(RATE, momentum=0.9, nesterov=True), partial(torch_sgd, momentum=0.9, nesterov=True)),
    ("adam", adam(RATE), torch_adam),
    ("adam large eps", adam(RATE, betas=(0.5, 0.9), eps=1e-2), partial(torch_adam, betas=(0.5, 0.9), eps=1e-2)),
    ("adam decay", adam(RATE, weight_decay=0.1), partial(torch_adam, decay=0.1)),
    ("adam no momentum", adam(RATE, betas=(0.0, 0.9)), partial(torch_adam, betas=(0.0, 0.9))),
    ("adamw", adamw(RATE), partial(torch_adam, decay=0.01, decoupled=True)),
    ("adamw decay", adamw(RATE, weight_decay=0.2), partial(torch_adam, decay=0.2, decoupled=True)),
    ("rmsprop", rmsprop(RATE), torch_rmsprop),
    ("rmsprop centered", rmsprop(RATE, centered=True), partial(torch_rmsprop, centered=True)),
    (
        "rmsprop all",
        rmsprop(RATE, alpha=0.9, eps=1e-3, weight_decay=0.1, momentum=0.8, centered=True),
        partial(torch_rmsprop, alpha=0.9, eps=1e-3, decay=0.1, momentum=0.8, centered=True),
    ),
    ("adagrad", adagrad(RATE), torch_adagrad),
    (
        "adagrad all",
        adagrad(RATE, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.5, eps=1e-3),
        partial(torch_adagrad, lr_decay=0.1, decay=0.1, start=0.5, eps=1e-3),
    ),
    ("lion", lion(RATE), paper_lion),
    ("nadam", nadam(RATE), torch_nadam),
    (
        "nadam all",
        nadam(RATE, betas=(0.8, 0.9), eps=1e-2, weight_decay=0.1, momentum_decay=1.0),
        partial(torch_nadam, betas=(0.8, 0.9), eps=1e-2, decay=0.1, momentum_decay=1.0),
    ),
    (
        "nadam decoupled",
        nadam(RATE, weight_decay=0.1, decoupled_weight_decay=True),
        partial(torch_nadam, decay=0.1, decoupled=True),
    ),
    ("nadamw", nadamw(RATE), partial(torch_nadam, decay=0.01, decoupled=True)),
    ("amsgrad", adam(RATE, betas=(0.9, 0.9), amsgrad=True), partial(torch_adam, betas=(0.9, 0.9), amsgrad=True)),
    ("lamb", lamb(RATE), paper_lamb),
    (
        "lamb all",
        lamb(RATE, betas=(0.8, 0.9), eps=1e-2, weight_decay=0.0),
        partial(paper_lamb, betas=(0.8, 0.9), eps=1e-2, decay=0.0),
    ),
    ("adafactor", adafactor(RATE), torch_adafactor),
    (
        "adafactor all",
        adafactor(RATE * 20, beta2_decay=-0.5, eps=(0.1, 0.5), d=1.5, weight_decay=0.1),
        lambda param, grads, lr: torch_adafactor(param, grads, lr * 20, power=-0.5, eps=(0.1, 0.5), d=1.5, decay=0.1),
    ),
    ("muon", muon(RATE, ns_dtype="float64"), torch_muon),
    (
        "muon moonlight",
        muon(RATE, momentum=0.5, weight_decay=0.0, nesterov=False, scale="moonlight", ns_dtype="float64"),
        partial(torch_muon, momentum=0.5, decay=0.0, nesterov=False, factor=0.2 * math.sqrt(5)),
    ),
    ("muon in_out", muon(RATE, layout="in_out", ns_dtype="float64"), partial(torch_muon, factor=1.0)),
    ("muon by adamw", muon(RATE, method="adamw"), partial(torch_adam, decay=0.1, decoupled=True)),
    ("schedule_free", schedule_free(RATE), paper_schedule_free),
    (
        "schedule_free all",
        schedule_free(RATE, betas=(0.8, 0.9), eps=1e-2, weight_decay=0.1),
        partial(paper_schedule_free, betas=(0.8, 0.9), eps=1e-2, decay=0.1),
    ),
    ("lion decay", lion(RATE, betas=(0.8, 0.95), weight_decay=0.1), partial(paper_lion, betas=(0.8, 0.95), decay=0.1)),
]


def run(spec: Any, param: Any, grads: list[Any]) -> Any:
    """`spec`'s formula over NumPy, in the dtype of `param`."""
    shapes = {name: spec.slot_shape(name, param.shape) for name in spec.slots}
    slots = {name: np.full(shape, spec.initial(name), param.dtype) for name, shape in shapes.items()}
    for number, grad in enumerate(grads, start=1):
        count = param.dtype.type(number)
        rate = spec.rate(count - 1, XP)
        param, slots = spec.update(XP, param, grad, slots, rate, count)
        assert tuple(slots) == spec.slots
        assert {array.dtype for array in [param, *slots.values()]} == {grads[0].dtype}
        assert {name: array.shape for name, array in slots.items()} == shapes
        assert param.shape == grads[0].shape
    return param


def problem() -> tuple[Array, list[Array]]:
    rng = np.random.default_rng(3)
    scales = np.array([1e-4, 1e-2, 1.0, 30.0])
    return rng.normal(size=(5, 4)), [rng.normal(size=(5, 4)) * scales + 0.1 * scales for _ in range(STEPS)]


@pytest.mark.parametrize(("name", "spec", "oracle"), CASES, ids=[case[0] for case in CASES])
def test_s21_formula_is_pytorchs(name: str, spec: Any, oracle: Oracle) -> None:
    param, grads = problem()
    expected = oracle(param, grads, RATE)
    assert np.abs(expected - param).max() > RATE, "the problem moves the parameters"
    np.testing.assert_allclose(run(spec, param, grads), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("name", "spec", "oracle"), CASES, ids=[case[0] for case in CASES])
def test_s21_float32_stays_close(name: str, spec: Any, oracle: Oracle) -> None:
    param, grads = problem()
    narrow = run(spec, param.astype(np.float32), [grad.astype(np.float32) for grad in grads])
    assert narrow.dtype == np.float32
    np.testing.assert_allclose(narrow, oracle(param, grads, RATE), rtol=2e-4, atol=2e-5)


def test_a_convolution_trains_alike_whatever_the_order_of_its_axes() -> None:
    """(outputs, inputs, positions) and (positions, inputs, outputs): Adafactor's rows are the same numbers."""
    rng = np.random.default_rng(1)
    kernel, grads = rng.normal(size=(5, 4, 3)), [rng.normal(size=(5, 4, 3)) for _ in range(5)]
    first = run(adafactor(RATE, layout="out_in"), kernel, grads)
    last = run(adafactor(RATE, layout="in_out"), kernel.T, [grad.T for grad in grads])
    np.testing.assert_allclose(last.T, first, rtol=1e-12)
    torchs = run(adafactor(RATE, layout="in_out"), kernel, grads)  # the last two axes, as torch's class takes them
    assert np.abs(torchs - first).max() > 1e-3


def test_bias_correction_keeps_its_digits_in_float32() -> None:
    param = run(adam(1.0, eps=0.0), f32([1.0]), [f32([1e-3])])
    assert float(param[0]) == pytest.approx(0.0, abs=5e-7), "the first step of Adam is exactly the learning rate"


DEFAULTS: list[tuple[Any, dict[str, Any]]] = [
    (sgd(), {"learning_rate": 1e-3, "momentum": 0.0, "weight_decay": 0.0, "nesterov": False}),
    (adam(), {"learning_rate": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}),
    (adamw(), {"learning_rate": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "amsgrad": False}),
    (
        rmsprop(),
        {"learning_rate": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False},
    ),
    (
        adagrad(),
        {"learning_rate": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10},
    ),
    (lion(), {"learning_rate": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}),
    (
        nadam(),
        {
            "learning_rate": 2e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0.0,
            "momentum_decay": 4e-3,
            "decoupled_weight_decay": False,
        },
    ),
    (
        nadamw(),
        {
            "learning_rate": 2e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 1e-2,
            "momentum_decay": 4e-3,
            "decoupled_weight_decay": True,
        },
    ),
    (lamb(), {"learning_rate": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 1e-2}),
    (
        adafactor(),
        {
            "learning_rate": 1e-2,
            "beta2_decay": -0.8,
            "eps": (float(np.finfo(np.float32).eps), 1e-3),
            "d": 1.0,
            "weight_decay": 0.0,
            "layout": "auto",
        },
    ),
    (
        muon(),
        {
            "learning_rate": 1e-3,
            "momentum": 0.95,
            "weight_decay": 0.1,
            "nesterov": True,
            "ns_coefficients": (3.4445, -4.775, 2.0315),
            "ns_steps": 5,
            "scale": "original",
            "ns_dtype": "auto",
            "method": "auto",
            "layout": "auto",
            "adamw_learning_rate": None,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
        },
    ),
    (schedule_free(), {"learning_rate": 2.5e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}),
]


@pytest.mark.parametrize(("spec", "defaults"), DEFAULTS, ids=[type(spec).__name__ for spec, _ in DEFAULTS])
def test_defaults_are_pytorchs_and_all_of_them_are_listed(spec: Any, defaults: dict[str, Any]) -> None:
    assert {name: getattr(spec, name) for name in spec.field_names} == {**defaults, "groups": ()}
    assert list(inspect.signature(type(spec)).parameters) == [*defaults, "groups"]


def test_every_spec_is_tested() -> None:
    assert {type(spec) for spec, _ in DEFAULTS} == set(SPECS) == {type(spec) for _, spec, _ in CASES}


@pytest.mark.parametrize(
    ("spec", "slots"),
    [
        (sgd(), ()),
        (sgd(momentum=0.9), ("momentum",)),
        (adam(), ("exp_avg", "exp_avg_sq")),
        (adamw(), ("exp_avg", "exp_avg_sq")),
        (rmsprop(), ("square_avg",)),
        (rmsprop(centered=True, momentum=0.5), ("square_avg", "grad_avg", "momentum")),
        (adagrad(), ("sum",)),
        (lion(), ("exp_avg",)),
        (nadam(), ("exp_avg", "exp_avg_sq", "mu_product")),
        (adamw(amsgrad=True), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
    ],
)
def test_slots(spec: Any, slots: tuple[str, ...]) -> None:
    assert spec.slots == slots
    assert is_spec(spec)
    assert not is_spec(type(spec))


def test_rate_is_a_scalar_of_the_framework() -> None:
    fixed, scheduled = sgd(0.25), sgd(schedules.linear_warmup(1.0, 4))
    for spec, expected in ((fixed, [0.25] * 3), (scheduled, [0.0, 0.25, 0.5])):
        rates = [spec.rate(np.float32(count), XP) for count in range(3)]
        assert [float(rate) for rate in rates] == expected
        assert {rate.dtype.name for rate in rates} == {"float32"}
    assert scheduled.rate(2, PYTHON) == 0.5
    assert fixed.rate(2, PYTHON) == 0.25


def test_scheduled_update_uses_the_applied_count() -> None:
    spec = sgd(schedules.piecewise((1.0, 0.0), boundaries=(2,)))
    param = run(spec, f32([0.0]), [f32([1.0])] * 5)
    assert param.tolist() == [-2.0]


@pytest.mark.parametrize("spec", [spec for _, spec, _ in CASES], ids=[name for name, _, _ in CASES])
def test_specs_are_frozen_hashable_and_pickle(spec: Any) -> None:
    with pytest.raises(AttributeError):
        spec.learning_rate = 1.0
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert hash(pickle.loads(pickle.dumps(spec))) == hash(spec)


def _not_a_number(name: str, limit: str) -> str:
    return rf"{name} must be a finite number of at least 0{limit}.*\. Received: {name}="


INVALID: list[tuple[Callable[[], Any], str]] = [
    *(
        (lambda spec=spec, value=value: spec(value), r"learning_rate must be .* or a polyamp\.schedules schedule\. Rec")
        for spec in SPECS
        for value in (-1e-3, math.nan, math.inf, True, None, "0.1", lambda count: 0.1, schedules.Constant)
    ),
    *(
        (lambda make=make, name=name, value=value: make(**{name: value}), _not_a_number(name, ""))
        for make, names in (
            (sgd, ["weight_decay"]),
            (adam, ["eps", "weight_decay"]),
            (adamw, ["eps", "weight_decay"]),
            (rmsprop, ["eps", "weight_decay"]),
            (adagrad, ["lr_decay", "weight_decay", "initial_accumulator_value", "eps"]),
            (lion, ["weight_decay"]),
        )
        for name in names
        for value in (-0.1, math.nan, math.inf, True, "0")
    ),
    *(
        (lambda make=make, name=name, value=value: make(**{name: value}), _not_a_number(name, " and below 1"))
        for make, name in ((sgd, "momentum"), (rmsprop, "momentum"), (rmsprop, "alpha"))
        for value in (-0.1, 1.0, math.nan, True)
    ),
    *(
        (lambda make=make, value=value: make(betas=value), r"betas must be ")
        for make in (adam, adamw, lion)
        for value in ((0.9, 1.0), (-0.1, 0.9), (0.9,), [0.9, 0.99], 0.9, (0.9, math.nan), (True, 0.9))
    ),
    (lambda: sgd(nesterov=True), r"nesterov=True needs a momentum above 0\. Received: momentum=0\.0\."),
    (
        lambda: sgd(momentum=0.9, nesterov=ONE),
        r"nesterov must be True or False\. Received: nesterov=1\.",
    ),
    (lambda: muon(scale=YES), r"scale must be one of 'original', 'moonlight'\. Received: scale='yes'\."),
    (lambda: muon(ns_steps=0), r"ns_steps must be a whole number from 1 to 99\. Received: ns_steps=0\."),
    (lambda: muon(ns_coefficients=(1.0, ONE, 1.0)), r"ns_coefficients must be three finite floats"),
    (lambda: muon(adamw_learning_rate=-1.0), r"adamw_learning_rate must be a finite number of at least 0"),
    (lambda: adafactor(beta2_decay=0.8), r"beta2_decay must be a finite number of at most 0\. Received: .*=0\.8\."),
    (lambda: adafactor(d=0.5), r"d must be at least 1\. Received: d=0\.5\."),
    (lambda: schedule_free(betas=(0.0, 0.9)), r"betas\[0\] must be above 0"),
    (lambda: nadamw(decoupled_weight_decay=False), r"nadamw decouples its weight decay\. .* Use nadam\."),
    (
        lambda: rmsprop(centered=YES),
        r"centered must be True or False\. Received: centered='yes'\.",
    ),
]


@pytest.mark.parametrize(("make", "message"), INVALID)
def test_impossible_values_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make()


def test_a_schedule_of_another_library_is_refused_with_its_name_in_like() -> None:
    def cosine_decay_schedule() -> Callable[[int], float]:
        return lambda count: 0.1

    made = cosine_decay_schedule()
    made.__module__, made.__qualname__ = "optax.schedules._schedule", "cosine_decay_schedule.<locals>.schedule"
    keras_class = type("CosineDecay", (), {"__module__": "keras.src.optimizers.schedules.learning_rate_schedule"})
    for value, name in ((made, "optax.cosine_decay_schedule"), (keras_class(), "keras.CosineDecay")):
        assert name in LIBRARY_SCHEDULES
        with pytest.raises(RecipeError, match=rf'Write polyamp\.schedules\.like\("{name}", \.\.\.\), with the'):
            adamw(value)

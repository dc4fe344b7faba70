"""The oracle's operations: values against NumPy in float64, gradients against differences, dtypes under a policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polyamp.reference import tensor as ops
from polyamp.reference.tensor import Tensor, casting_mode, gradients

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)
X = RNG.uniform(0.3, 1.7, (3, 4)) * np.asarray([[1.0], [3.0], [0.2]])
Y = RNG.uniform(0.3, 1.7, (3, 4))
ROW = RNG.uniform(0.3, 1.7, 4)
SIGNED = X - 0.8


def normalized(x: Array) -> Array:
    return np.asarray((x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-3))


def softmax(x: Array) -> Array:
    return np.asarray(np.exp(x) / np.exp(x).sum(-1, keepdims=True))


UNARY: dict[str, tuple[Callable[[Any], Any], Callable[[Array], Any], Array]] = {
    "exp": (ops.exp, np.exp, SIGNED),
    "log": (ops.log, np.log, X),
    "sigmoid": (ops.sigmoid, lambda x: 1 / (1 + np.exp(-x)), SIGNED),
    "relu": (ops.relu, lambda x: np.maximum(x, 0), SIGNED),
    "power": (lambda x: ops.power(x, 3.0), lambda x: x**3, SIGNED),
    "operator **": (lambda x: x**0.5, np.sqrt, X),
    "negative": (lambda x: -x, np.negative, SIGNED),
    "total": (ops.total, np.sum, SIGNED),
    "total of rows": (lambda x: ops.total(x, 0), lambda x: x.sum(0), SIGNED),
    "mean": (ops.mean, np.mean, SIGNED),
    "mean of columns": (lambda x: ops.mean(x, axis=-1), lambda x: x.mean(-1), SIGNED),
    "cumulative_sum": (ops.cumulative_sum, lambda x: np.cumsum(x, -1), SIGNED),
    "log_sum_exp": (ops.log_sum_exp, lambda x: np.log(np.exp(x).sum(-1)), SIGNED),
    "log_softmax": (ops.log_softmax, lambda x: np.log(softmax(x)), SIGNED),
    "softmax": (ops.softmax, softmax, SIGNED),
    "normalize": (lambda x: ops.normalize(x, 1e-3), normalized, SIGNED),
    "where": (lambda x: ops.where(Y > 1, x, 5.0), lambda x: np.where(Y > 1, x, 5.0), SIGNED),
    "an index twice": (lambda x: x[np.asarray([0, 2, 0])], lambda x: x[[0, 2, 0]], SIGNED),
    "a row times": (lambda x: x * ROW, lambda x: x * ROW, SIGNED),
    "by a row": (lambda x: x / ROW, lambda x: x / ROW, SIGNED),
    "a number by": (lambda x: 2.0 / x, lambda x: 2.0 / x, X),
    "less a number": (lambda x: x - 0.5, lambda x: x - 0.5, SIGNED),
    "a number less": (lambda x: 0.5 - x, lambda x: 0.5 - x, SIGNED),
    "more": (lambda x: 1.5 + x, lambda x: 1.5 + x, SIGNED),
}
BINARY: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Array, Array], Any], Array, Array]] = {
    "matmul": (lambda a, b: a @ b, lambda a, b: a @ b, SIGNED, Y.T.copy()),
    "inner": (ops.inner, lambda a, b: (a * b).sum(-1), SIGNED, Y),
    "outer": (ops.outer, np.outer, ROW, SIGNED[0].copy()),
    "sum": (lambda a, b: a + b, lambda a, b: a + b, SIGNED, ROW),
    "difference": (lambda a, b: a - b, lambda a, b: a - b, ROW, SIGNED),
    "product": (lambda a, b: a * b, lambda a, b: a * b, SIGNED, Y[:, :1].copy()),
    "quotient": (lambda a, b: a / b, lambda a, b: a / b, SIGNED, ROW),
}


def differences(function: Callable[..., Any], inputs: list[Array], weights: Array) -> list[Array]:
    """Central differences of sum(function * weights), in float64."""
    found = []
    for place, given in enumerate(inputs):
        slopes = np.zeros_like(given)
        for index in np.ndindex(given.shape):
            ends = []
            for step in (1e-6, -1e-6):
                moved = [each.copy() for each in inputs]
                moved[place][index] += step
                ends.append(float(np.sum(function(*moved) * weights)))
            slopes[index] = (ends[0] - ends[1]) / 2e-6
        found.append(slopes)
    return found


def check(function: Callable[..., Any], numpy: Callable[..., Any], inputs: list[Array]) -> None:
    """Value, gradient of each input, and what nothing depends on."""
    given, other = [Tensor(each) for each in inputs], Tensor(np.ones(2))
    found = function(*given)
    expected = np.asarray(numpy(*inputs))
    assert found.shape == expected.shape
    np.testing.assert_allclose(found.data, expected, rtol=1e-12)
    weights = np.random.default_rng(1).normal(size=expected.shape)
    *slopes, none = gradients(ops.total(found * weights), [*given, other])
    assert none is None
    for slope, wanted in zip(slopes, differences(numpy, inputs, weights), strict=True):
        assert slope is not None
        assert slope.shape == wanted.shape
        np.testing.assert_allclose(slope, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", UNARY)
def test_s21_an_operation_of_one_array_has_numpys_value_and_its_own_derivative(name: str) -> None:
    function, numpy, given = UNARY[name]
    check(function, numpy, [given])


@pytest.mark.parametrize("name", BINARY)
def test_s21_an_operation_of_two_arrays_has_numpys_value_and_both_derivatives(name: str) -> None:
    function, numpy, one, two = BINARY[name]
    check(function, numpy, [one, two])


def test_s07_what_is_used_twice_has_the_sum_of_its_gradients() -> None:
    x = Tensor(SIGNED)
    (found,) = gradients(ops.total(x * x + ops.exp(x)), [x])
    np.testing.assert_allclose(found, 2 * SIGNED + np.exp(SIGNED), rtol=1e-12)  # type: ignore[arg-type]  # it is used


FOLLOWING = ("relu", "negative", "where", "an index twice", "less a number", "more")
MIXING = ("a row times", "by a row", "a number by", "a number less")
"""With NumPy's own float64."""


@pytest.mark.parametrize("name", [name for name in UNARY if name not in MIXING])
def test_s04_sensitive_operations_run_in_float32_under_a_policy_and_the_others_follow_their_input(name: str) -> None:
    """And their gradients come back in the input's dtype; without the sensitive list all of them follow it."""
    function, _, given = UNARY[name]
    x = Tensor(given.astype(np.float16))
    for sensitive in (True, False):
        with casting_mode("float16", sensitive=sensitive):
            found = function(x)
            (slope,) = gradients(ops.total(found), [x])
        wide = sensitive and name not in FOLLOWING
        assert found.dtype == (np.float32 if wide else np.float16)
        assert slope is not None
        assert slope.dtype == np.float16


def test_s04_products_run_in_the_policys_dtype_and_what_contracts_nothing_follows_its_operands() -> None:
    one, two = Tensor(SIGNED.astype(np.float32)), Tensor(Y.T.astype(np.float32))
    thin = Tensor(SIGNED[:, :1].astype(np.float32)), Tensor(Y[:1].astype(np.float32))
    with casting_mode("float16", sensitive=True):
        assert (one @ two).dtype == np.float16
        assert (thin[0] @ thin[1]).dtype == np.float32
        assert ops.inner(ops.cast(one, "float16"), Tensor(Y.astype(np.float16))).dtype == np.float32
        assert ops.outer(Tensor(ROW.astype(np.float16)), Tensor(ROW.astype(np.float16))).dtype == np.float16
        slopes = gradients(ops.total(one @ two), [one, two])
    assert [slope.dtype for slope in slopes if slope is not None] == [np.float32, np.float32]


def test_s04_a_16_bit_product_is_accumulated_in_float32() -> None:
    """4096 times 1 plus one 1 more is no number of float16; sums of float16 would stop at 2048."""
    ones = Tensor(np.ones((1, 3000), np.float16))
    assert float((ones @ Tensor(np.ones((3000, 1), np.float16))).data[0, 0]) == 3000.0


def test_s02_only_floating_arrays_are_cast() -> None:
    integers = Tensor(np.asarray([1, 2]))
    assert ops.cast(integers, "float16") is integers
    assert ops.cast(Tensor(ROW), "float64").dtype == np.float64
    assert ops.tensor(integers) is integers

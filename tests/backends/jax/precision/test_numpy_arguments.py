"""`policy.autocast(fn)` on NumPy arrays: the framework is the function's own (S3), and its products are in float16."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyamp

POLICY = polyamp.Policy("mixed_float16")
FINE = np.eye(2, dtype=np.float32) * np.float32(1.0 + 2.0**-12)  # float16 rounds it to 1
ARRAY = jnp.ones(1)


def product(x: Any) -> Any:
    return jnp.matmul(x, x)


def through_a_helper(x: Any) -> Any:
    return product(x)


def imported_inside(x: Any) -> Any:
    from jax.numpy import matmul

    return matmul(x, x)


def over_an_array(array: Any) -> Any:
    return lambda x: (x * array) @ (x * array)


def with_a_default(x: Any, array: Any = ARRAY) -> Any:
    return (x * array) @ (x * array)


class Model:
    def method(self, x: Any) -> Any:
        return product(x)


class Plain:
    def __init__(self) -> None:
        self.array = jnp.ones(1)

    def __call__(self, x: Any) -> Any:
        return (x * self.array) @ (x * self.array)


FUNCTIONS = {
    "global": product,
    "helper": through_a_helper,
    "import": imported_inside,
    "closure": over_an_array(jnp.ones(1)),
    "default": with_a_default,
    "partial": functools.partial(with_a_default, array=jnp.ones(1)),
    "method": Model().method,
    "object": Plain(),
    "bound": Plain().__call__,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_s03_numpy_arguments_leave_the_framework_to_the_function(name: str) -> None:
    function = FUNCTIONS[name]
    assert float(function(FINE)[0, 0]) != 1.0
    result = POLICY.autocast(function)(FINE)
    assert (float(result[0, 0]), result.dtype) == (1.0, jnp.float32)


def test_s03_a_decorated_function_with_numpy_arguments() -> None:
    @POLICY.autocast
    def decorated(x: Any) -> Any:
        return jnp.matmul(x, x)

    assert float(decorated(FINE)[0, 0]) == 1.0


@pytest.mark.parametrize("function", [jnp.matmul, jax.jit(product)], ids=["jnp", "jit"])
def test_s03_a_compiled_function(function: Any) -> None:
    arguments = (FINE, FINE) if function is jnp.matmul else (FINE,)
    assert float(POLICY.autocast(function)(*arguments)[0, 0]) == 1.0


def test_explain_takes_numpy_arguments() -> None:
    (row,) = polyamp.explain(through_a_helper, POLICY, FINE).operations
    assert (row.name, row.dtype) == ("dot_general", "float16")

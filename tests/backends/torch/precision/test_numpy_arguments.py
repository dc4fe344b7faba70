"""`policy.autocast(fn)` on NumPy arrays: the framework is the function's own (S3), and its products are in float16."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import polyamp

POLICY = polyamp.Policy("mixed_float16")
FINE = np.eye(2, dtype=np.float32) * np.float32(1.0 + 2.0**-12)  # float16 rounds it to 1


def product(x: Any) -> Any:
    return torch.matmul(torch.as_tensor(x), torch.as_tensor(x))


def through_a_helper(x: Any) -> Any:
    return product(x)


def imported_inside(x: Any) -> Any:
    from torch import as_tensor

    return as_tensor(x) @ as_tensor(x)


def over_an_array(array: Any) -> Any:
    return lambda x: array.new_tensor(x) @ array.new_tensor(x)


def with_a_default(x: Any, array: Any = torch.ones(1)) -> Any:  # noqa: B008  # the default is what is looked for
    return array.new_tensor(x) @ array.new_tensor(x)


class Model(nn.Module):
    def method(self, x: Any) -> Any:
        return product(x)


class Plain:
    def __init__(self) -> None:
        self.array = torch.ones(1)

    def __call__(self, x: Any) -> Any:
        return self.array.new_tensor(x) @ self.array.new_tensor(x)


FUNCTIONS = {
    "global": product,
    "helper": through_a_helper,
    "import": imported_inside,
    "closure": over_an_array(torch.ones(1)),
    "default": with_a_default,
    "partial": functools.partial(with_a_default, array=torch.ones(1)),
    "method": Model().method,
    "object": Plain(),
    "bound": Plain().__call__,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_s03_numpy_arguments_leave_the_framework_to_the_function(name: str) -> None:
    function = FUNCTIONS[name]
    assert float(function(FINE)[0, 0]) != 1.0
    result = POLICY.autocast(function)(FINE)
    assert (float(result[0, 0]), result.dtype) == (1.0, torch.float32)


def test_s03_a_decorated_function_with_numpy_arguments() -> None:
    @POLICY.autocast
    def decorated(x: Any) -> Any:
        return torch.matmul(torch.as_tensor(x), torch.as_tensor(x))

    assert float(decorated(FINE)[0, 0]) == 1.0


def test_s03_torchs_own_function() -> None:
    assert POLICY.autocast(torch.eye)(2).dtype is torch.float32
    with pytest.raises(TypeError, match=r"must be Tensor, not numpy\.ndarray"):
        POLICY.autocast(torch.matmul)(FINE, FINE)

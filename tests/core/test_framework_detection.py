"""Which framework a plain function is for, when its arguments are NumPy arrays or say nothing."""

from __future__ import annotations

import functools
import types
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp import BackendError, Policy, framework_detection
from polyamp import backend_lookup as lookup
from polyamp.contract import registry
from polyamp.errors import BackendNotInstalledError
from polyamp.reference import tensor
from polyamp.reference.tensor import Tensor


def test_numpy_arrays_do_not_choose_the_reference() -> None:
    """They go into a function of any framework, which would then run in float32 without a word."""
    policy, ones = Policy("p=f32,c=f16,o=f32"), np.ones(1, np.float32)
    message = (
        r"cannot tell which framework \S*<lambda> computes with: .*No framework is seen in it\. Name it: "
        r"policy\.autocast\(fn, backend='jax'\), .*a function of NumPy alone is for 'reference'\."
    )
    with pytest.raises(BackendError, match=message):
        policy.autocast(lambda x: x + x)(ones)
    with pytest.raises(BackendError, match=message):
        polyamp.explain(lambda x: x + x, policy, ones)
    dtypes: list[str] = []
    policy.autocast(lambda x: dtypes.append(x.dtype.name), backend="reference")(ones)
    assert dtypes == ["float16"]


def test_a_function_that_names_the_reference_is_for_it() -> None:
    def product(x: Any) -> Any:
        return tensor.matmul(Tensor(x), Tensor(x))

    fine = np.eye(2, dtype=np.float32) * np.float32(1.0 + 2.0**-12)
    assert product(fine).data[0, 0] != 1.0
    assert Policy("mixed_float16").autocast(product)(fine).data[0, 0] == 1.0


class Framework:
    """Stands for another framework's module, array and function."""

    def __init__(self, name: str) -> None:
        self.module = types.ModuleType(name)
        self.array = type("Array", (), {"__module__": f"{name}.core"})()


def test_a_function_with_two_frameworks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = Framework("one"), Framework("two")
    both = {"one": SimpleNamespace(value="a:BACKEND"), "two": SimpleNamespace(value="b:BACKEND")}
    monkeypatch.setattr(lookup, "entries", lambda: lookup.BackendEntries(both, {}))

    def mixed(x: Any, there: Any = other.array) -> Any:
        return one.module, x, there

    assert framework_detection.detect_frameworks(mixed, both) == ["one", "two"]
    with pytest.raises(BackendError, match=r"It has to do with one and two\. Name it: "):
        Policy("mixed_float16").autocast(mixed)(np.ones(1))


def _helper(x: Any) -> Any:
    import one  # type: ignore[import-not-found]  # never called: only its code is read

    return one.exp(x)


class _Layer:
    def __init__(self, weight: Any) -> None:
        self.weight = weight

    def __call__(self, x: Any) -> Any:
        return x

    def method(self, x: Any) -> Any:
        return _helper(x)

    @staticmethod
    def plain(x: Any) -> Any:
        return x


def test_where_the_evidence_is_looked_for() -> None:
    array = Framework("one").array

    def closure(x: Any) -> Any:
        return x, array

    def default(x: Any, y: Any = (1, {"deep": array})) -> Any:
        return x, y

    def keyword(x: Any, *, y: Any = array) -> Any:
        return x, y

    def unfilled(x: Any) -> Any:
        return x, later

    found = [framework_detection.detect_frameworks(unfilled, ["one"])]
    later = array
    inner = [lambda x: lambda: _helper(x), _helper, closure, default, keyword, unfilled]
    held = [functools.partial(_Layer.plain, array), _Layer(array), _Layer([array]).plain, _Layer(None).method]
    found += [framework_detection.detect_frameworks(function, ["one"]) for function in (*inner, *held)]
    nothing = [False, *[True] * 6, True, True, False, True]
    assert [bool(roots) for roots in found] == nothing
    assert (
        framework_detection.detect_frameworks(
            lambda x: np.exp(x) + polyamp.losses.mean_squared_error(x, x), registry.entries()
        )
        == []
    )
    assert framework_detection.detect_frameworks(np.exp, registry.entries()) == []


def test_large_and_circular_values_are_not_searched_for_ever() -> None:
    circle: list[Any] = []
    circle.append(circle)
    data = [[number] for number in range(100_000)]
    assert framework_detection.detect_frameworks(lambda x: (x, circle, data, Framework), ["one"]) == []


def test_autocast_finds_keyword_arrays_and_missing_frameworks(monkeypatch: pytest.MonkeyPatch) -> None:
    run = polyamp.Policy(compute="bfloat16").autocast(lambda *, x: x)
    assert run(x=Tensor(np.ones(2, np.float32))).dtype == np.float32

    def missing(*objects: Any) -> Any:
        raise BackendNotInstalledError("needs tiny")

    monkeypatch.setattr(lookup, "backend_for", missing)
    with pytest.raises(BackendNotInstalledError):
        polyamp.Policy("mixed_bfloat16").autocast(lambda x: x)

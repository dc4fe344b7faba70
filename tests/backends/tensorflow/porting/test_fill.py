"""A fill is whole or nothing, whatever layout the values come in."""

from __future__ import annotations

import signal
from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest
from keras import layers

from polyamp.errors import PortError
from polyamp.porting import rollback
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp_keras.porting import fill
from polyamp_keras.porting.converter import CONVERTER


def network(dtype: str = "float32") -> Any:
    keras.utils.set_random_seed(0)
    stack = [layers.Conv2D(4, 3, dtype=dtype), layers.Flatten(dtype=dtype), layers.Dense(3, dtype=dtype)]
    return keras.Sequential([keras.Input((6, 5, 2)), *stack])


def values(model: Any) -> dict[str, Any]:
    return {weight.path: np.array(weight.value.numpy()) for weight in model.weights}


def test_values_in_any_layout_arrive_and_are_copied() -> None:
    model = network("bfloat16")
    rng = np.random.default_rng(0)
    kernel = rng.standard_normal((3, 4, 3, 2)).astype(ml_dtypes.bfloat16).transpose(2, 0, 3, 1)
    dense = rng.standard_normal((3, 96)).astype(ml_dtypes.bfloat16)[:, ::2].T
    bias = np.arange(3).astype(ml_dtypes.bfloat16)
    given = {"conv2d/kernel": kernel, "dense/kernel": dense, "dense/bias": bias}
    CONVERTER.fill(model, {name: Lazy.of(array) for name, array in given.items()})
    expected = {name: np.array(array) for name, array in given.items()}
    for array in given.values():
        array[...] = 0
    for layer in CONVERTER.inventory(model).layers:
        for leaf in layer.leaves.values():
            if leaf.name in expected:
                np.testing.assert_array_equal(leaf.array.read(), expected[leaf.name])


def test_what_was_read_before_a_fill_is_not_changed_by_it() -> None:
    model = network()
    held = CONVERTER.inventory(model).layers[0].leaves["kernel"].array.read()
    before = held.copy()
    CONVERTER.fill(model, {"conv2d/kernel": Lazy.of(np.zeros((3, 3, 2, 4), np.float32))})
    np.testing.assert_array_equal(held, before)


@pytest.mark.parametrize("error", [OSError("the disk is gone"), KeyboardInterrupt()])
def test_what_was_written_comes_back_where_an_array_cannot_be_read(error: BaseException) -> None:
    model = network()
    before = values(model)

    def broken() -> Any:
        raise error

    given = {"conv2d/kernel": Lazy.of(np.zeros((3, 3, 2, 4), np.float32)), "dense/bias": Lazy((3,), "float32", broken)}
    with pytest.raises(type(error)):
        CONVERTER.fill(model, given)
    for name, array in values(model).items():
        np.testing.assert_array_equal(array, before[name])


def test_an_array_that_is_made_anew_by_each_read_and_breaks_the_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollback, "_MIN_BUDGET", 0)
    monkeypatch.setattr(rollback, "_BUDGET_SHARE", 0.0)
    model = network()
    before = values(model)
    reads = []

    def second_breaks() -> Any:
        reads.append(0)
        if len(reads) > 1:
            raise OSError("the disk is gone")
        return np.zeros(3, np.float32)

    anew = Lazy((3, 3, 2, 4), "float32", lambda: np.zeros((3, 3, 2, 4), np.float32))
    with pytest.raises(OSError, match="the disk is gone"):
        CONVERTER.fill(model, {"conv2d/kernel": anew, "dense/bias": Lazy((3,), "float32", second_breaks)})
    for name, array in values(model).items():
        np.testing.assert_array_equal(array, before[name])


def test_an_interrupt_waits_until_the_model_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    assign = fill.assign

    def interrupted(variable: Any, array: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        assign(variable, array)

    monkeypatch.setattr(fill, "assign", interrupted)
    given = {"conv2d/bias": np.ones(4, np.float32), "dense/bias": np.ones(3, np.float32)}
    with pytest.raises(KeyboardInterrupt):
        CONVERTER.fill(model, {name: Lazy.of(array) for name, array in given.items()})
    assert [model.weights[number].value.numpy().sum() for number in (1, 3)] == [4.0, 3.0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("dense/kernle", np.zeros(3), "has no variable 'dense/kernle'. Did you mean 'dense/kernel'"),
        ("dense/bias", np.zeros(4, np.float32), r"'dense/bias' is float32\[3\]. Received: float32\[4\]"),
        ("dense/bias", np.zeros(3), r"'dense/bias' is float32\[3\]. Received: float64\[3\]"),
    ],
)
def test_names_shapes_and_dtypes_are_checked_before_anything_is_written(name: str, array: Any, message: str) -> None:
    model = network()
    before = values(model)
    with pytest.raises(PortError, match=message):
        CONVERTER.fill(model, {"conv2d/bias": Lazy.of(np.ones(4, np.float32)), name: Lazy.of(array)})
    np.testing.assert_array_equal(values(model)[model.weights[1].path], before[model.weights[1].path])


def test_every_replica_gets_the_values(two_cpus: Any) -> None:
    with two_cpus.scope():
        model = network()
    CONVERTER.fill(model, {"dense/bias": Lazy.of(np.arange(3, dtype=np.float32))})
    held = two_cpus.experimental_local_results(model.weights[-1].value)
    assert [copy.numpy().tolist() for copy in held] == [[0.0, 1.0, 2.0]] * 2

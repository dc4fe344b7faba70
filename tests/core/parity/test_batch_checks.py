"""What is given as batches: loaders and generators are refused by name, lists that may mean two things too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.errors import ArgumentError, RecipeError
from polyamp.parity.execution.batch_checks import RepeatCheck, check_batches
from polyamp.porting.check import Batch
from polyamp.reference import MLP

X, Y = np.ones((16, 4), np.float32), np.ones((16, 1), np.float32)


class Loader:
    """What torch's `DataLoader` and TensorFlow's `Dataset` have in common: they are iterated."""

    def __iter__(self) -> Any:
        return iter([X])


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (Loader(), r"batch must be a batch, .* Received: a Loader \(tests\), which every run would have to begin anew"),
        ((X for _ in range(3)), r"Received: a generator, .* batch=\[\(x.numpy\(\), y.numpy\(\)\) for x, y in"),
        ([X, Y], r"batch is a list, .* \[16, 4\], float32 \[16, 1\]. For one batch of several arrays give a tuple"),
        ([X, np.arange(16)], r"float32 \[16, 4\], int64 \[16\]"),
        ([], "batch must hold at least one batch. Received: an empty list."),
    ],
    ids=["loader", "generator", "x and y", "x and labels", "empty"],
)
def test_what_is_no_batch_is_refused_by_name(batches: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        polyamp.compare(MLP.random([4, 1], seed=0), MLP.random([4, 1], seed=0), batches)


@pytest.mark.parametrize(
    "batches",
    [X, (X, Y), {"x": X}, [X, X[:3]], [{"x": X}, {"x": X[:2]}], [(X, Y), (X, Y)], Batch(X, Y), lambda step: X],
    ids=["array", "tuple", "dict", "list of arrays", "list of dicts", "list of tuples", "of each side", "function"],
)
def test_what_is_one_is_taken(batches: Any) -> None:
    check_batches(batches, "batch")


@pytest.mark.parametrize(("one", "two"), [(np.float32, np.float64), (np.int32, np.int64)])
def test_ones_of_a_wider_dtype_are_the_same_batch(one: type, two: type) -> None:
    """`torch.ones(2)` is float64 in a float64 run."""
    check = RepeatCheck("data")
    assert check.check(0, {"x": np.ones(2, one)}) == check.check(0, {"x": np.ones(2, two)})


def test_other_batches_at_a_later_call_are_refused_in_one_process_too() -> None:
    rng = np.random.default_rng(0)

    def made(_: int) -> Any:
        return rng.standard_normal((16, 4)).astype("f4")

    with pytest.raises(RecipeError, match=r"batch\(0\) gave other arrays at a later call. .* seed it with the step"):
        polyamp.compare(MLP.random([4, 1], seed=0), MLP.random([4, 1], seed=0), made)

"""Where two forward passes part: values matched by what they are (`verdict.operation_split`), on made-up records."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import numpy as np
import pytest

from polyamp.parity.report_data import OperationSite
from polyamp.parity.trace.operation_log import (
    OperationLog,
    OperationRecorder,
    PassLocation,
    SourceFrame,
    are_equal,
    hidden_folders,
    is_visible,
    running_frame,
    summarize,
)
from polyamp.parity.verdict.operation_split import split_operations

X = np.random.default_rng(0).standard_normal((3, 4, 8))
END = PassLocation("head", "output")


def _caller() -> SourceFrame:
    frame = sys._getframe(2)
    return frame.f_code.co_filename, frame.f_lineno


class _MadeUpProgram:
    """A made-up pass: each operation is recorded with this file's line as its place."""

    def __init__(self, dtype: str = "float64") -> None:
        self._recorder, self._dtype = OperationRecorder(END), dtype
        self._arrays: list[Any] = []

    def given(self, array: Any) -> int:
        self._arrays.append(array)
        return self._recorder.add_given(array, self._dtype)

    def given_in_float32(self, array: Any) -> int:
        self._arrays.append(array)
        return self._recorder.add_given(array, "float32")

    def run(self, name: str, function: Any, *inputs: int, dtype: str = "") -> int:
        self._arrays.append(function(*(self._arrays[each] for each in inputs)))
        return self._recorder.add(name, inputs, self._arrays[-1], dtype or self._dtype, _caller())

    def end(self) -> OperationLog:
        self._recorder.see("head", "output", self._arrays[-1])
        return self._recorder.log()


def _norm(epsilon: float, *, has_channels_first: bool = False, dtype: str = "float64") -> OperationLog:
    program, axis = _MadeUpProgram(dtype), 1 if has_channels_first else -1
    x = program.given(np.moveaxis(X, -1, 1) if has_channels_first else X)
    square = program.run("multiply" if has_channels_first else "square", lambda x: x * x, x)
    mean = program.run("mean", lambda x: x.mean(axis, keepdims=True), square)
    shifted = program.run("add", lambda x: x + epsilon, mean)
    if has_channels_first:
        root = program.run("rsqrt", lambda x: x**-0.5, shifted)
        program.run("mul", lambda x, y: x * y, x, root)
    else:
        root = program.run("sqrt", np.sqrt, shifted)
        program.run("div", lambda x, y: x / y, x, root)
    return program.end()


def _names(sites: tuple[OperationSite, ...]) -> list[str]:
    return [site.operation for site in sites]


def test_the_first_operation_whose_value_the_other_side_lacks_is_named_with_its_line() -> None:
    sites = split_operations(_norm(1e-5), _norm(1e-3, has_channels_first=True), 5e-4)
    assert _names(sites) == ["add", "add"]
    assert all(site.file == __file__ and "epsilon, mean)" in site.code for site in sites)


@pytest.mark.parametrize(
    ("dtype", "epsilon", "distance"), [("bfloat16", 0.1, 0.05), ("float32", 1.1e-5, 1e-6), ("float64", 1e-5, 0.1)]
)
def test_nothing_is_said_where_values_do_not_show_it(dtype: str, epsilon: float, distance: float) -> None:
    """16 bits; a difference as small as the rounding of float32; and values that do not differ at all."""
    assert split_operations(_norm(1e-5, dtype=dtype), _norm(epsilon, dtype=dtype), distance) == ()


def test_a_batch_in_float32_rounds_nothing_but_a_cast_inside_does() -> None:
    def program(epsilon: float, *, is_cast: bool) -> OperationLog:
        made = _MadeUpProgram("float64")
        x = made.given_in_float32(X.astype(np.float32))
        x = made.run("widen", lambda x: x.astype(np.float64), x)
        x = made.run("exp", np.exp, x)
        if is_cast:
            x = made.run("narrow", lambda x: x.astype(np.float32), x, dtype="float32")
        made.run("add", lambda x: x + epsilon, x)
        return made.end()

    sites = split_operations(program(1e-6, is_cast=False), program(2e-6, is_cast=False), 1e-6)
    assert _names(sites) == ["add", "add"]
    assert split_operations(program(1e-6, is_cast=True), program(2e-6, is_cast=True), 1e-6) == ()


def test_nothing_is_said_without_an_end() -> None:
    log = _norm(1e-3)
    assert split_operations(OperationLog(log.records), log, 0.1) == ()


def _attention(scale: float, *, is_query_scaled: bool) -> OperationLog:
    program = _MadeUpProgram()
    q, k = program.given(X), program.given(X**2)
    if is_query_scaled:
        q = program.run("scale query", lambda q: q * scale, q)
    scores = program.run("product", lambda q, k: q @ k.swapaxes(1, 2), q, k)
    if not is_query_scaled:
        scores = program.run("scale scores", lambda x: x * scale, scores)
    weights = program.run("exp", np.exp, scores)
    sums = program.run("sum", lambda x: x.sum(-1, keepdims=True), weights)
    program.run("div", lambda x, y: x / y, weights, sums)
    return program.end()


def test_another_formulation_before_the_difference_is_no_difference() -> None:
    one = _attention(0.5, is_query_scaled=True)
    program = _MadeUpProgram()
    q, k = program.given(X), program.given(X**2)
    scores = program.run("product", lambda q, k: (q @ k.swapaxes(1, 2)) * 0.5, q, k)
    weights = program.run("exp", np.exp, scores)
    sums = program.run("sum", lambda x: x.sum(-2, keepdims=True), weights)
    program.run("div", lambda x, y: x / y, weights, sums)
    assert _names(split_operations(one, program.end(), 0.3)) == ["sum", "sum"]
    assert _names(split_operations(one, _attention(0.25, is_query_scaled=False), 0.3)) == ["scale query", "product"]


def test_a_side_that_lacks_the_last_operation_says_so() -> None:
    programs = _MadeUpProgram(), _MadeUpProgram()
    for number, program in enumerate(programs):
        x = program.given(X)
        tanh = program.run("tanh", np.tanh, x)
        if number:
            program.run("add", lambda x, y: x + y, x, tanh)
    one, two = split_operations(programs[0].end(), programs[1].end(), 0.5)
    assert (one.operation, one.is_missing) == ("tanh", True)
    assert (two.operation, two.is_missing) == ("add", False)


def test_sides_that_have_both_values_and_take_another_are_shown_where_they_made_it() -> None:
    logs = []
    for takes in ("tanh", "exp"):
        program = _MadeUpProgram()
        x = program.given(X)
        made = {"tanh": program.run("tanh", np.tanh, x), "exp": program.run("exp", np.exp, x)}
        program.run("reshape", lambda x: x.reshape(3, -1), made[takes])
        logs.append(program.end())
    sites = split_operations(logs[0], logs[1], 0.5)
    assert [(site.operation, site.is_missing) for site in sites] == [("tanh", False), ("exp", False)]


def test_operations_on_constants_are_not_named_but_what_takes_them() -> None:
    """A mask that one side adds and the other side multiplies by is another form of the same."""
    logs = []
    for value, factor in ((-1e9, 1.0), (0.0, 1.1)):
        program = _MadeUpProgram()
        mask = program.run("mask", lambda value=value: np.where(np.tri(4), 0.5, value))
        x = program.given(X[:, :, :4])
        x = program.run("scale", lambda x, factor=factor: x * factor, x)
        program.run("apply", lambda x, mask, v=value: x + mask if v else x * mask, x, mask)
        logs.append(program.end())
    assert _names(split_operations(logs[0], logs[1], 0.5)) == ["apply", "scale"]


def test_tables_of_one_size_with_other_values_are_named_themselves() -> None:
    logs = []
    for base in (1e4, 1e3):
        program = _MadeUpProgram()
        steps = program.run("arange", lambda: np.arange(8.0))
        powers = program.run("pow", lambda x, base=base: base ** (x / 8), steps)
        table = program.run("sin", np.sin, powers)
        program.run("apply", lambda x, y: x * y, program.given(X), table)
        logs.append(program.end())
    assert _names(split_operations(logs[0], logs[1], 0.5)) == ["pow", "pow"]


def test_tables_of_the_same_numbers_at_other_places_differ() -> None:
    logs = []
    for lower in (False, True):
        program = _MadeUpProgram()
        ones = program.run("ones", lambda: np.ones((4, 4)))
        mask = program.run("tril", np.tril, ones) if lower else program.run("triu", np.triu, ones)
        scores = program.given(X[0, :, :4])
        program.run("mask", lambda x, y: x * y, scores, mask)
        logs.append(program.end())
    assert _names(split_operations(logs[0], logs[1], 0.5)) == ["triu", "tril"]


def test_the_record_ends_at_its_value() -> None:
    recorder = OperationRecorder(END)
    given = recorder.add_given(X, "float32")
    made = recorder.add("scale", [given], 2 * X, "float32", None)
    recorder.add("copy", [made], 2 * X, "float32", None)
    recorder.see("head", "input", X)
    assert not recorder.is_closed
    recorder.see("head", "output", 2 * X.reshape(-1)[::-1])  # in another order
    assert recorder.is_closed
    assert recorder.log().end == made == 1


def test_summaries_are_equal_for_the_same_values_in_another_order() -> None:
    value = summarize(X, "float64")
    assert (value.size, value.nonfinite) == (96, 0)
    assert are_equal(value, summarize(X.T, "float64"), 1e-13)
    changed = X.copy()
    changed[0, 0, 0] += 1e-6
    assert not are_equal(value, summarize(changed, "float64"), 1e-10)
    assert not are_equal(value, summarize(-X, "float64"), 1e-10)
    masked = summarize(np.where(X > 0, X, -np.inf), "float64")
    assert masked.nonfinite == int((X <= 0).sum())
    assert masked.quantiles[0] == 0.0
    assert summarize(np.array([1e200]), "float64").squares < np.inf


def test_lines_of_polyamp_of_a_framework_and_of_python_are_not_shown() -> None:
    hidden = hidden_folders(["numpy"])
    assert not any(is_visible(file, hidden) for file in (np.__file__, summarize.__code__.co_filename, "<frozen x>"))
    assert not is_visible(contextlib.__file__, hidden)
    assert is_visible(__file__, hidden)
    assert (running_frame([]) or ("",))[0] == __file__
    assert is_visible("/lib/python3/site-packages/transformers/models/llama.py", hidden)

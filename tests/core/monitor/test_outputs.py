"""Figures of modules' outputs: their limits, in records and files, in tables and pages (S35)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.errors import ArgumentError, UnsupportedError
from polyamp.monitor.monitor_page import monitor_page
from polyamp.monitor.records import read_monitor_file
from polyamp.monitor.slots import output_limits
from polyamp.monitor.text_table import module_table, output_table
from polyamp.monitor.writers import JsonLinesWriter, scalar_values
from polyamp.reference import MLP


def trained(monitor: polyamp.Monitor, gain: float = 1.0) -> None:
    recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.sgd(1e-3))
    state = polyamp.init(MLP.random([4, 8, 1], seed=0), recipe)
    step = polyamp.train_step(
        lambda model, x: polyamp.losses.mean_squared_error(model(x), x[:, :1]), recipe, monitor=monitor
    )
    step(state, np.full((2, 4), gain, np.float32))


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
def test_limits_are_those_of_a_cast(compute: str) -> None:
    import ml_dtypes

    dtype: Any = ml_dtypes.bfloat16 if compute == "bfloat16" else compute
    wide = np.float32
    zero, overflow = (wide(limit) for limit in (output_limits(compute).zero, output_limits(compute).overflow))
    one = wide(1.0)
    assert np.asarray(zero).astype(dtype) == 0.0
    assert np.asarray(np.nextafter(zero, one)).astype(dtype) != 0.0
    with np.errstate(over="ignore"):
        assert np.isinf(np.asarray(overflow).astype(dtype))
        assert np.isfinite(np.asarray(np.nextafter(overflow, one)).astype(dtype))


def test_arrays_of_float32_and_float64_are_judged_as_they_are() -> None:
    assert output_limits("float32").overflow == output_limits("float64").overflow == math.inf
    for compute in ("float32", "float64"):
        limits = output_limits(compute)
        smallest = np.float32(2.0**-149)
        assert np.float32(limits.zero) == 0.0
        assert (smallest < np.float32(limits.normal)) == (compute == "float32")


def test_records_files_tables_and_pages_have_them(tmp_path: Path) -> None:
    monitor = polyamp.Monitor(1, updates=False, activations=True, writers=[JsonLinesWriter(tmp_path / "run.jsonl")])
    trained(monitor, gain=6e4)
    monitor.close()
    (record,) = monitor.records
    assert [each.module for each in record.modules] == ["dense0", "dense1", ""]
    first, _, whole = (each.activations for each in record.modules)
    assert first is not None
    assert whole is not None
    assert (first.elements, first.largest) == (16, math.inf)
    assert 0.0 < first.overflow < 1.0
    assert record.modules[2].gradients is None
    read = read_monitor_file(tmp_path / "run.jsonl")
    assert read.records[0].modules[0].activations == first
    named = dict(scalar_values(record))
    assert named["activations/dense0/overflow"] == first.overflow
    assert named["activations/dense0/largest"] == math.inf
    table = output_table(record)
    assert table is not None
    assert table.row_count == 3
    assert output_table(record, most=1).row_count == 1  # type: ignore[union-attr]  # there are outputs
    assert module_table(record).row_count == 2
    tables = monitor_page(read.header, read.records).sections[-1].tables
    assert [len(each.rows) for each in tables] == [2, 3]
    assert tables[1].rows[0][0] == "dense0"
    assert tables[1].rows[0][-1] == "inf"


def test_none_are_read_without_being_asked_for() -> None:
    monitor = polyamp.Monitor(1)
    trained(monitor)
    assert all(each.activations is None for each in monitor.records[0].modules)
    assert output_table(monitor.records[0]) is None
    assert not any(name.startswith("activations") for name, _ in scalar_values(monitor.records[0]))


@pytest.mark.parametrize("value", [3, [], [1], None])
def test_wrong_activations(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"activations must be True .* or globs of module paths"):
        polyamp.Monitor(activations=value)


def test_a_loop_that_does_not_own_the_forward_pass_refuses_them() -> None:
    with pytest.raises(UnsupportedError, match=r"activations=\['a/\*'\]\) is read by polyamp.train_step"):
        polyamp.Monitor(activations="a/*").loop_selection()

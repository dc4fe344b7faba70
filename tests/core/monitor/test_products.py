"""Figures of products in 8 bits: in records and files, in tables, pages and the command (S35, S36).

What a step collects is tested for every backend in `polyamp.conformance.test_float8`.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import polyamp
from polyamp.cli import app as cli
from polyamp.errors import ArgumentError, UnsupportedError
from polyamp.monitor.exponents import product_stats
from polyamp.monitor.monitor_page import monitor_page
from polyamp.monitor.records import encode_line, read_monitor_file
from polyamp.monitor.text_table import module_table, product_table
from polyamp.monitor.writers import JsonLinesWriter, scalar_values
from polyamp.reference import MLP

POLICY = polyamp.Policy("mixed_float8", float8=polyamp.Float8(emulate=True))


def trained(monitor: polyamp.Monitor, gain: float = 1.0) -> None:
    recipe = polyamp.Recipe(policy=POLICY, optimizer=polyamp.sgd(1e-3))
    state = polyamp.init(MLP.random([16, 16, 16, 1], seed=0), recipe)
    step = polyamp.train_step(
        lambda model, x: polyamp.losses.mean_squared_error(model(x), x[:, :1]), recipe, monitor=monitor
    )
    x = np.ones((2, 16), np.float32)
    x[0, 1], x[1] = 2.0**-20, gain
    step(state, x)


def test_records_files_tables_and_pages_have_them(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    monitor = polyamp.Monitor(1, updates=False, products=True, writers=[JsonLinesWriter(path)])
    trained(monitor)
    monitor.close()
    (record,) = monitor.records
    first, second, last = (each.products for each in record.modules)
    assert first is not None
    assert second is not None
    assert last is None  # one output is no multiple of 16
    assert (first.inputs.elements, first.weights.elements, first.gradients.elements) == (32, 256, 32)
    assert first.inputs.underflow == 1 / 32
    assert first.inputs.sqnr == pytest.approx(10 * math.log10(31 * 2.0**40), abs=1e-6)
    assert first.weights.sqnr is not None
    assert 28.0 < first.weights.sqnr < 34.0
    read = read_monitor_file(path)
    assert read.records == [record]
    named = dict(scalar_values(record))
    assert named["products/dense0/inputs/underflow"] == 1 / 32
    assert named["products/dense0/weights/sqnr"] == first.weights.sqnr
    table = product_table(record)
    assert table is not None
    assert table.row_count == 2
    assert product_table(record, most=1).row_count == 1  # type: ignore[union-attr]  # there are products
    assert module_table(record).row_count == 3
    tables = monitor_page(read.header, read.records).sections[-1].tables
    assert [len(each.rows) for each in tables] == [3, 2]
    assert tables[1].rows[0][:3] == ["dense0", "3.12 %", "0"]
    shown = CliRunner().invoke(cli.app, ["monitor", str(path)], env={"COLUMNS": "120"}).output
    assert "products in 8 bits of module" in shown
    assert "3.12 %" in shown


def test_an_operand_that_is_not_finite_has_no_ratio(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    monitor = polyamp.Monitor(1, updates=False, products=True, writers=[JsonLinesWriter(path)])
    trained(monitor, gain=math.inf)
    monitor.close()
    products = monitor.records[0].modules[0].products
    assert products is not None
    assert (products.inputs.underflow, products.inputs.sqnr) == (0.0, None)
    assert "products/dense0/inputs/sqnr" not in dict(scalar_values(monitor.records[0]))
    assert list(map(encode_line, read_monitor_file(path).records)) == list(map(encode_line, monitor.records))


def test_nothing_is_lost_of_numbers_that_8_bits_have() -> None:
    sums = np.array([[4.0, 0.0, 5.0, 0.0], [4.0, 2.0, 5.0, 0.05], [4.0, 0.0, 0.0, 0.0]])
    found = product_stats(sums)
    assert found is not None
    assert found.inputs.sqnr == math.inf
    assert (found.weights.underflow, found.weights.sqnr) == (0.5, pytest.approx(20.0))
    assert found.gradients.sqnr is None
    assert product_stats(np.zeros((3, 4))) is None


def test_none_are_read_without_being_asked_for() -> None:
    monitor = polyamp.Monitor(1)
    trained(monitor)
    assert all(each.products is None for each in monitor.records[0].modules)
    assert product_table(monitor.records[0]) is None


def test_a_policy_without_products_in_8_bits_is_refused() -> None:
    recipe = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.sgd(0.1))
    with pytest.raises(ArgumentError, match=r"products=True\) measures products in 8 bits.*compute='bfloat16'"):
        polyamp.train_step(lambda model, x: model(x), recipe, monitor=polyamp.Monitor(products=True))


def test_a_loop_that_does_not_own_the_passes_refuses_them() -> None:
    with pytest.raises(UnsupportedError, match=r"products=True\) is read by polyamp.train_step.*Leave out products="):
        polyamp.Monitor(products=True).loop_selection()

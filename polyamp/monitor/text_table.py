"""Tables of a monitor's records for a terminal, and `LiveTableWriter`, which shows them while a training runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from polyamp.monitor.monitor_page import (
    OUTPUT_COLUMNS,
    PRODUCT_COLUMNS,
    has_parameter_figures,
    output_cells,
    percent,
    product_cells,
)
from polyamp.monitor.records import PRODUCT_OPERANDS, MonitorRecord, ProductStats

_COLOURS: Final = {"settled": "green", "searching": "yellow", "sinking": "red"}


def record_table(records: Sequence[MonitorRecord], *, most: int = 20) -> Table:
    """Return a table of the last records, a line each."""
    table = Table(box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("call", "updates", "loss", "gradient norm", "scale", "skips"):
        table.add_column(name, justify="right")
    table.add_column("word")
    for record in records[-most:]:
        skips = "?" if record.skips is None else f"{record.skips}"
        table.add_row(
            f"{record.call:,}",
            f"{record.step:,}",
            _number(record.loss),
            _number(record.grad_norm),
            f"{record.scale:g}",
            f"{skips} (this one)" if record.skipped else skips,
            f"[{_COLOURS[record.word]}]{record.word}[/]",
        )
    return table


def module_table(record: MonitorRecord, *, most: int = 20) -> Table:
    """Return a table of a record's modules: those that lose most, in the order of the model."""
    rows = []
    own = [number for number, each in enumerate(record.modules) if has_parameter_figures(each)]
    order = sorted(own, key=lambda number: _loss_key(record, number), reverse=True)[:most]
    for number in sorted(order):
        each = record.modules[number]
        stats = each.gradients
        shares = [stats.zero, stats.underflow, stats.subnormal, stats.overflow] if stats is not None else []
        cells = [
            *([percent(share) for share in shares] or ["-"] * 4),
            "-" if stats is None else _number(stats.norm),
            "-" if each.update_ratio is None else f"{each.update_ratio:.2g}",
        ]
        rows.append((each.module, cells))
    return _table_by_module("module", ("zero", "underflow", "subnormal", "overflow", "norm", "update / weight"), rows)


def output_table(record: MonitorRecord, *, most: int = 20) -> Table | None:
    """Return a table of the outputs of a record's modules: those with the largest values, in order, or None."""
    named = [(each.module, each.activations) for each in record.modules if each.activations is not None]
    order = sorted(range(len(named)), key=lambda number: (named[number][1].overflow, named[number][1].largest))[-most:]
    rows = [(named[number][0], output_cells(named[number][1])) for number in sorted(order)]
    return _table_by_module("outputs of module", OUTPUT_COLUMNS, rows) if rows else None


def product_table(record: MonitorRecord, *, most: int = 20) -> Table | None:
    """Return a table of the products in 8 bits of a record's modules: those that lose most, in order, or None."""
    named = [(each.module, each.products) for each in record.modules if each.products is not None]
    order = sorted(range(len(named)), key=lambda number: _smallest_ratio(named[number][1]))[:most]
    rows = [(named[number][0], product_cells(named[number][1])) for number in sorted(order)]
    return _table_by_module("products in 8 bits of module", PRODUCT_COLUMNS, rows) if rows else None


def _table_by_module(first: str, columns: Sequence[str], rows: Sequence[tuple[str, list[str]]]) -> Table:
    """Return a table of cells by module path."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(first, overflow="fold")
    for name in columns:
        table.add_column(name, justify="right")
    for path, cells in rows:
        table.add_row(escape(path) or "(the model)", *cells)
    return table


def _smallest_ratio(stats: ProductStats) -> float:
    """Return the smallest signal-to-noise ratio of the operands, in dB; inf if none has one."""
    ratios = [getattr(stats, operand).sqnr for operand in PRODUCT_OPERANDS]
    return min((ratio for ratio in ratios if ratio is not None), default=math.inf)


class LiveTableWriter:
    """Shows the last records in the terminal, and draws them again at each record.

    Args:
        most: number of records that are shown.
        console: a `rich.console.Console`; standard output by default.
    """

    def __init__(self, most: int = 10, console: Console | None = None) -> None:
        self._most = most
        self._console = console
        self._records: list[MonitorRecord] = []
        self._live: Any = None

    def write(self, record: MonitorRecord) -> None:
        """Show a record."""
        self._records = [*self._records, record][-self._most :]
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(record_table(self._records, most=self._most), refresh=True)

    def close(self) -> None:
        """Leave the table as it is."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def _loss_key(record: MonitorRecord, number: int) -> float:
    stats = record.modules[number].gradients
    return -1.0 if stats is None else stats.zero + stats.underflow + stats.overflow + 0.1 * stats.subnormal


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else str(value)

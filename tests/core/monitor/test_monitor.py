"""Records of a monitor: figures from counts, words, files, writers, page and table (S35).

What a step collects is tested for every backend in `polyamp.conformance.test_monitor`.
"""

from __future__ import annotations

import copy
import csv
import errno
import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import polyamp
from polyamp.cli import app as cli
from polyamp.errors import ArgumentError
from polyamp.float_formats import FORMATS
from polyamp.monitor.exponents import tensor_stats
from polyamp.monitor.monitor_page import monitor_page, percent
from polyamp.monitor.records import (
    FORMAT_VERSION,
    MonitorHeader,
    MonitorRecord,
    encode_line,
    read_monitor_file,
)
from polyamp.monitor.scale_words import ScaleJudge, ScalePoint
from polyamp.monitor.slots import MonitorSelection
from polyamp.monitor.text_table import LiveTableWriter, module_table, record_table
from polyamp.monitor.writers import CsvWriter, JsonLinesWriter, TensorBoardWriter, TrackerWriter
from polyamp.reference import MLP
from polyamp.report_page.html_page import render_html
from polyamp.report_page.svg_charts import draw_chart

RECIPE = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.sgd(0.1), scaler=polyamp.LossScaler(init_scale=16.0))
BATCH = {"x": np.ones((2, 4), np.float32), "y": np.zeros((2, 1), np.float32)}


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch["x"]), batch["y"])


def train(monitor: polyamp.Monitor, steps: int, **changes: Any) -> None:
    """Train a small model of the reference."""
    recipe = RECIPE.replace(**changes)
    state = polyamp.init(MLP.random([4, 8, 1], seed=0), recipe)
    step = polyamp.train_step(loss_fn, recipe, monitor=monitor)
    for _ in range(steps):
        state, _ = step(state, BATCH)


def record(call: int = 10, **changes: Any) -> MonitorRecord:
    """Return a record."""
    given: dict[str, Any] = {"call": call, "step": call, "loss": 1.5, "grad_norm": 0.5, "scale": 8.0}
    given |= {"next_scale": 8.0, "skipped": False, "skips": 0, "word": "settled", "reason": "r"}
    return MonitorRecord(**{**given, **changes})


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
def test_shares_are_those_of_the_dtype(compute: str) -> None:
    """Against casts of the numbers themselves, one for each exponent."""
    form = FORMATS[compute]
    exponents = np.arange(-126, 127)
    values = (1.5 * 2.0**exponents).astype(np.float32)
    counts = np.bincount(exponents + 127, minlength=256)
    found = tensor_stats(counts, 0.0, compute)
    assert found is not None
    with np.errstate(all="ignore"):
        cast = values.astype(np.dtype(compute)).astype(np.float64)
    assert found.underflow == np.mean(cast == 0.0)
    assert found.overflow == np.mean(np.isinf(cast))
    assert found.subnormal == np.mean((cast > 0.0) & (values < form.smallest_normal))
    assert (found.first_exponent, found.exponents) == (-126, [1] * 253)


def test_a_factor_moves_the_exponents() -> None:
    counts = np.zeros(256, int)
    counts[[0, 127 - 30, 255]] = 2, 5, 1
    plain, scaled = tensor_stats(counts, 1.0, "float16"), tensor_stats(counts, 1.0, "float16", 3000.0)
    assert plain is not None
    assert scaled is not None
    assert (plain.underflow, plain.subnormal, plain.first_exponent) == (0.625, 0.0, -30)
    assert (scaled.underflow, scaled.subnormal, scaled.first_exponent) == (0.0, 0.625, -19)
    assert (plain.zero, plain.overflow) == (0.25, 0.125)
    assert tensor_stats(np.zeros(256, int), 0.0, "float16") is None


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ([(100, 8192.0, 3), (200, 8192.0, 0), (299, 8192.0, 0)], ["searching"] * 3),
        ([(100, 8192.0, 3), (300, 8192.0, 0), (400, 4096.0, 1)], ["searching", "settled", "settled"]),
        ([(100, 8192.0, 0), (150, 16384.0, 0)], ["searching", "settled"]),
        ([(200, 1024.0, 0), (300, 128.0, 3), (400, 64.0, 1)], ["settled", "settled", "sinking"]),
        ([(200, 1024.0, 0), (300, 64.0, 4), (400, 128.0, 0)], ["settled", "sinking", "settled"]),
        ([(100, 2.0**-3, 5)], ["sinking"]),
        ([(100, 65536.0, None), (300, 65536.0, 0)], ["searching", "settled"]),
    ],
)
def test_words(points: list[tuple[int, float, int | None]], words: list[str]) -> None:
    judge = ScaleJudge(polyamp.LossScaler(growth_interval=200))
    assert [judge(ScalePoint(*point)).word for point in points] == words


def test_words_without_a_dynamic_scale() -> None:
    assert ScaleJudge(polyamp.LossScaler.off())(ScalePoint(1, 1.0, 0)) == ("settled", "the loss is not scaled")
    fixed = ScaleJudge(polyamp.LossScaler.static(0.5))(ScalePoint(1, 0.5, 0))
    assert fixed == ("settled", "the scale is fixed at 0.5")


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (None, ("a/b", "a/c", "")),
        (1, ("a", "")),
        (("a/*",), ("a/b", "a/c")),
        (("",), ("",)),
    ],
)
def test_modules_of_parameters(modules: Any, expected: tuple[str, ...]) -> None:
    selection = MonitorSelection(True, True, True, modules, 1)
    assert selection.modules_of(["a/b/kernel", "a/b/bias", "a/c/kernel", "scale"]) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, r"every must be a positive int\. Received: 0"),
        ({"every": True}, "every must be a positive int"),
        ({"modules": 0}, "modules must be None, a positive depth such as 2, or globs"),
        ({"modules": []}, "modules must be None, a positive depth"),
        ({"writers": [print]}, r"each of writers must have write\(record\) and close\(\)"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        polyamp.Monitor(**arguments)


def test_train_step_takes_a_monitor_only() -> None:
    with pytest.raises(ArgumentError, match=r"monitor must be a polyamp\.Monitor\. Received: 100"):
        polyamp.train_step(loss_fn, RECIPE, monitor=100)  # type: ignore[arg-type]  # what is tested


def test_a_file_is_read_again_also_torn_and_with_numbers_that_are_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    monitor = polyamp.Monitor(every=2, weights=True, writers=[JsonLinesWriter(path)])
    train(monitor, 6)
    monitor.close()
    found = read_monitor_file(path)
    assert found.records == monitor.records
    assert (found.header.compute, found.header.every, found.header.backend) == ("float16", 2, "reference")
    bad = record(loss=math.nan, grad_norm=math.inf, word="sinking", reason="inf")
    with path.open("a") as file:
        file.write(encode_line(bad) + "\n" + encode_line(bad)[:20])
    torn = read_monitor_file(path)
    assert torn.torn
    assert torn.records[:3] == found.records
    assert (torn.records[3].grad_norm, torn.records[3].reason) == (math.inf, "inf")
    assert math.isnan(torn.records[3].loss)
    assert json.loads(encode_line(bad))["loss"] == "nan"


def test_what_is_no_such_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"path must be a file that can be read\. Received: '.*none"):
        read_monitor_file(tmp_path / "none")
    other = tmp_path / "other"
    other.write_text('{"a": 1}\n')
    with pytest.raises(ArgumentError, match="whose first line is no such header"):
        read_monitor_file(other)


def test_csv_and_trackers(tmp_path: Path) -> None:
    class Run:
        def __init__(self) -> None:
            self.logged: list[tuple[dict[str, float], int]] = []

        def log(self, numbers: dict[str, float], step: int) -> None:
            self.logged.append((numbers, step))

    run = Run()
    monitor = polyamp.Monitor(every=2, writers=[CsvWriter(tmp_path / "run.csv"), TrackerWriter(run)])
    train(monitor, 4)
    monitor.close()
    with (tmp_path / "run.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["call"], float(row["loss"])) for row in rows] == [(str(r.call), r.loss) for r in monitor.records]
    assert [step for _, step in run.logged] == [2, 4]
    numbers = run.logged[0][0]
    first = monitor.records[0]
    assert numbers["polyamp/loss_scale"] == first.scale
    stats = first.modules[0].gradients
    assert stats is not None
    assert numbers[f"polyamp/gradients/{first.modules[0].module}/norm"] == stats.norm
    with pytest.raises(ArgumentError, match=r"tracker must have log\(numbers, step=\.\.\.\)"):
        TrackerWriter(3)


def test_a_writer_is_added_while_it_runs(tmp_path: Path) -> None:
    """It gets the header and what comes from then on; a tracker of a run that goes on has the run's numbers."""
    steps: list[int] = []

    class Run:
        def log(self, numbers: dict[str, float], step: int) -> None:
            steps.append(step)

    monitor = polyamp.Monitor(every=2)
    train(monitor, 2)
    monitor.add_writer(JsonLinesWriter(tmp_path / "run.jsonl"))
    monitor.add_writer(TrackerWriter(Run(), first_step=100))
    train(monitor, 4)
    monitor.close()
    file = read_monitor_file(tmp_path / "run.jsonl")
    assert file.header.every == 2
    assert [record.call for record in file.records] == [4, 6]
    assert steps == [104, 106]
    with pytest.raises(ArgumentError, match=r"must have write\(record\) and close\(\)\. Received: 3"):
        monitor.add_writer(3)  # type: ignore[arg-type]  # the mistake


def test_tensorboard_gets_scalars() -> None:
    class Events:
        def __init__(self) -> None:
            self.found: list[tuple[str, float, int]] = []
            self.closed = 0

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.found.append((name, value, step))

        def flush(self) -> None: ...

        def close(self) -> None:
            self.closed += 1

    events = Events()
    writer = TensorBoardWriter(events)
    writer.write(record(30))
    writer.close()
    writer.close()
    assert ("polyamp/loss", 1.5, 30) in events.found
    assert events.closed == 1
    with pytest.raises(ArgumentError, match="target must be a folder, or an object with add_scalar"):
        TensorBoardWriter(3)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("No space left")])
def test_a_full_disk_or_a_tracker_s_error_ends_a_writer_and_not_the_training(error: Exception) -> None:
    class Full:
        def write(self, record: MonitorRecord) -> None:
            raise error

        def close(self) -> None: ...

    monitor = polyamp.Monitor(every=1, writers=[Full()])
    with pytest.warns(RuntimeWarning, match=r"Full could not write \(\w+Error: .*No space left") as caught:
        train(monitor, 4)
    assert len(monitor.records) == 4
    assert len(caught) == 1


def test_an_error_in_the_training_leaves_what_was_collected(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    monitor = polyamp.Monitor(every=1, writers=[JsonLinesWriter(path)])

    def interrupted() -> None:
        with monitor:
            train(monitor, 3)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [each.call for each in read_monitor_file(path).records] == [1, 2, 3]


def test_a_step_that_raises_is_no_call() -> None:
    """It changes nothing, and is no skip."""
    failing: list[int] = []

    def fragile(model: Any, batch: Any) -> Any:
        failing.append(1)
        if len(failing) == 3:
            raise KeyError("fragile")
        return loss_fn(model, batch)

    monitor = polyamp.Monitor(every=2)
    state, step = (
        polyamp.init(MLP.random([4, 8, 1], seed=0), RECIPE),
        polyamp.train_step(fragile, RECIPE, monitor=monitor),
    )
    for number in range(5):
        if number == 2:
            with pytest.raises(KeyError):
                step(state, BATCH)
        else:
            state, _ = step(state, BATCH)
    assert [(each.call, each.step, each.skips) for each in monitor.records] == [(2, 2, 0), (4, 4, 0)]


def test_a_copy_has_the_records() -> None:
    monitor = polyamp.Monitor(every=2)
    train(monitor, 4)
    for other in (copy.deepcopy(monitor), pickle.loads(pickle.dumps(monitor))):
        assert other.records == monitor.records


def test_records_that_nothing_was_read_for(tmp_path: Path) -> None:
    monitor = polyamp.Monitor(every=10)
    train(monitor, 3)
    assert monitor.records == []
    with pytest.raises(ArgumentError, match="save: nothing was recorded yet"):
        monitor.save(tmp_path / "a.html")


def test_the_table_and_the_live_table() -> None:
    monitor = polyamp.Monitor(every=2)
    train(monitor, 6)
    console = Console(width=120, record=True, file=None, force_terminal=False, quiet=False)
    with console.capture() as capture:
        console.print(record_table([*monitor.records, record(8, skipped=True, skips=2, grad_norm=math.inf)]))
        console.print(module_table(monitor.records[-1]))
    text = capture.get()
    assert "2 (this one)" in text
    assert "inf" in text
    assert monitor.records[-1].modules[0].module in text
    with console.capture() as capture:
        live = LiveTableWriter(most=2, console=console)
        for call in (10, 20, 30):
            live.write(record(call))
        live.close()
        live.close()
    assert "30" in capture.get().split("call")[-1]


def test_the_command_draws_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    monitor = polyamp.Monitor(every=2, writers=[JsonLinesWriter(path)])
    train(monitor, 6)
    monitor.close()
    page = tmp_path / "run.html"
    shown = CliRunner().invoke(cli.app, ["monitor", str(path), "--save", str(page)])
    assert shown.exit_code == 0, shown.output
    for words in ("reference, Policy(", "[mixed: float32 master weights]", "gradient norm", "searching: "):
        assert words in shown.output
    assert "loss scale" in page.read_text()
    data = json.loads(CliRunner().invoke(cli.app, ["monitor", str(path), "--json"]).stdout)
    assert [each["call"] for each in data["records"]] == [2, 4, 6]
    with path.open("a") as file:
        file.write(encode_line(record(8, word="sinking")) + "\n{")
    sinking = CliRunner().invoke(cli.app, ["monitor", str(path)])
    assert sinking.exit_code == 1
    assert "The last line is not finished" in sinking.output
    assert CliRunner().invoke(cli.app, ["monitor", str(tmp_path / "none")]).exit_code == 2


def test_the_page_of_long_runs_stays_small() -> None:
    header = MonitorHeader(polyamp_monitor=FORMAT_VERSION, compute="float16", policy="p", every=1, backend="torch")
    records = [record(call, skipped=call == 777, grad_norm=math.inf if call == 777 else 1.0) for call in range(1, 5001)]
    page = monitor_page(header, records)
    drawn = draw_chart(page.sections[0].charts[0])
    assert drawn.count("L") <= 400
    assert drawn.count("h8l-4-8z") == 1  # the skipped record
    assert len(render_html(page)) < 100_000
    assert monitor_page(header, []).heading == "Nothing was recorded"
    assert percent(5e-7) == "< 0.0001 %"

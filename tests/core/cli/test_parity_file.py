"""`polyamp parity FILE.py`: what the file says, what the command line says beside it, exit status and files."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from polyamp.cli import parity
from polyamp.cli.app import app
from polyamp.cli.progress import show_progress
from polyamp.parity.execution import worker_messages
from polyamp.parity.report.report import Report
from polyamp.parity.report_data import Environment, Failure

FILE = """
import time

from parity_sides import batch as data, doubled, loss_fn, other, plain, RECIPE as recipe

build = {"one": plain, "two": other, "three": doubled}
steps = 2


def slow():
    print("slow", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "my_parity.py"
    path.write_text(FILE)
    yield path  # type: ignore[misc]
    sys.modules.pop("my_parity", None)


def invoke(*arguments: str | int | Path) -> Any:
    return CliRunner().invoke(app, ["parity", *map(str, arguments)])


def test_sides_that_agree_end_with_0_and_the_report_is_printed(file: Path, tmp_path: Path) -> None:
    result = invoke(file, "--backends", "one,two", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[:3] == [
        *(
            f"{side}: polyamp.reference.models.MLP, numpy {numpy_version()} on cpu, 67 parameters"
            for side in ("one", "two")
        ),
        "one, float32: step 1 of 2",
    ]
    assert "one and two agree: 2 steps under float32 and mixed_bfloat16" in lines
    assert lines[-1] == f"wrote {tmp_path / 'out' / 'report.json'}"
    assert Report.from_json((tmp_path / "out" / "report.json").read_bytes()).agrees


def test_sides_that_part_end_with_1_and_json_is_all_there_is_on_standard_output(file: Path) -> None:
    result = invoke(file, "--backends", "one,three", "--steps", 1, "--json")
    assert result.exit_code == 1
    report = Report.from_json(result.stdout)
    assert report.steps == 1
    assert report.first is not None
    assert report.first.module == "dense0"
    assert json.loads(result.stdout)["comparisons"][0]["sides"] == ["one", "three"]
    assert "one, float32: step 1 of 1" in result.stderr


def test_the_command_line_goes_before_the_file(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []

    def run(**arguments: Any) -> Report:
        calls.append(arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(parity, "run", run)
    file.write_text(FILE + "randomness = 'shared'\ntimeout = 5\nloss_fn = dict.fromkeys(build, loss_fn)\nat_once = 2\n")
    result = invoke(file, "--backends", "three, one", "--interpreter", "one=/bin/sh", "--timeout", 9, "--steps", 7)
    assert result.exit_code == 130
    (call,) = calls
    assert list(call.pop("build")) == ["three", "one"]
    assert list(call.pop("loss_fn")) == ["three", "one"]
    assert set(call) == {"data", "recipe", "steps", "interpreters", "timeout", "randomness", "at_once", "on_event"}
    assert (call["steps"], call["timeout"], call["randomness"]) == (7, 9.0, "shared")
    assert call["interpreters"] == {"one": "/bin/sh"}


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("data = 1\nbuilds = {}\n", [], "without build. Did you mean 'builds'? It may define loss_fn, recipe, steps, "),
        ("build = {}\n", [], "Received a file without data. It may define"),
        ("import numpi\n", [], "my_parity.py cannot be imported:\n"),
        ("def f(:\n", [], "SyntaxError: "),
        (FILE, ["--backends", "one,tow"], "one, two, three. Received: 'tow'. Did you mean 'two'?"),
        (FILE, ["--policies", "bf16"], "--policies is for recipes: my_parity.py says with recipe= what to train with."),
        (FILE + "build['one'] = lambda: 1\n", [], "build['one'] must be a function that another process can import"),
    ],
)
def test_what_cannot_be_ends_with_2(file: Path, text: str, options: list[str], message: str) -> None:
    file.write_text(text)
    result = invoke(file, *options)
    assert result.exit_code == 2
    assert message in result.output
    assert 'Traceback (most recent call last):\n  File "/work' not in result.output


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_end_from_outside_says_where_the_report_is(file: Path, tmp_path: Path, number: int, status: int) -> None:
    file.write_text(FILE + "build = {'one': plain, 'slow': slow}\n")
    out, log = tmp_path / "out", tmp_path / "out" / "sides" / "1-slow" / "log.txt"
    path = str(Path(__file__).parents[2] / "fixtures")
    code = f"import sys; sys.path.append({path!r}); from polyamp.cli import main; main()"
    command = [sys.executable, "-c", code, "parity", str(file), "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        limit = time.monotonic() + 60
        while not (log.exists() and log.read_text()) and time.monotonic() < limit and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == status
    assert said == (
        "polyamp.parity.run was interrupted; what was collected until then: " + str(out / "report.json") + "\n"
    )
    failures = Report.from_json((out / "report.json").read_bytes()).failures
    assert [(each.side, each.reason) for each in failures] == [("one", "interrupted"), ("slow", "interrupted")]


def test_bars_on_a_terminal_show_the_loss_and_what_failed() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, highlight=False)
    place = Environment(
        side="[a]", backend="jax", versions={"jax": "0.7"}, device="cpu", model="m.Net", parameters=1234
    )
    failure = Failure(side="b", phase="float32", step=3, reason="crashed", message="")
    with show_progress(console) as on_event:
        for event in (
            *(worker_messages.SideLaunchEvent(side=side) for side in ("[a]", "b")),
            worker_messages.SideBuildEvent(side="[a]", environment=place, recipe=None),
            worker_messages.SideProgressEvent(
                side="[a]", phase="mixed_float16", step=2, steps=2, loss=0.25, scale=2.0**13, skipped=3
            ),
            worker_messages.SideFinishEvent(side="[a]"),
            worker_messages.SideFailureEvent(failure=failure),
        ):
            on_event(event)
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    for text in (
        "[a]: m.Net, jax 0.7 on cpu, 1,234 parameters",
        "[a] mixed_float16",
        "loss 0.25   scale 2^13   skipped 3",
    ):
        assert text in said
    assert "b failed in step 3 under float32: crashed" in said


def test_lines_tell_of_each_quarter_and_of_what_is_not_installed() -> None:
    console = Console(file=io.StringIO(), width=110)
    missing = Failure(side="jax", phase="", step=0, reason="missing", message="long")
    with show_progress(console) as on_event:
        for side, last in (("torch", 21), ("keras", 40)):
            for step in range(1, last + 1):
                on_event(
                    worker_messages.SideProgressEvent(side=side, phase="fp16", step=step, steps=40, loss=0.5, scale=1.0)
                )
        on_event(worker_messages.SideFailureEvent(failure=missing))
    assert isinstance(console.file, io.StringIO)
    expected = [(side, step) for side, last in (("torch", 20), ("keras", 40)) for step in (1, *range(10, last + 1, 10))]
    assert console.file.getvalue().splitlines() == [
        *(f"{side}, fp16: step {step} of 40   loss 0.5" for side, step in expected),
        "jax left out: not installed",
    ]


def numpy_version() -> str:
    import numpy as np

    return np.__version__

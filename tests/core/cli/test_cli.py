"""Command line: exit status, messages, tables and files; no framework is needed."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

import polyamp
from polyamp.cli import tables
from polyamp.cli.app import app
from polyamp.demo import runner
from polyamp.demo.comparison_report import DemoReport, FrameworkFailure, FrameworkRun, compare


def make_report(**changes: Any) -> DemoReport:
    """Return a report of two frameworks and two policies; float16 skips its first two steps."""
    steps = 40
    runs = []
    for backend, shift in (("tensorflow", 0.0), ("torch", 1e-6)):
        curve: list[float | None] = [2.0 / (step + 1) + shift for step in range(steps)]
        scales = [2.0**14, 2.0**13] + [2.0**13] * (steps - 2)
        shared: dict[str, Any] = {"backend": backend, "version": "2.21.0+cpu", "device": "cpu", "losses": curve}
        runs.append(FrameworkRun(policy="float32", grad_norms=curve, scales=[1.0] * steps, skips=[False] * steps,
                        accuracy=0.975, applied=steps, ms_per_step=1.25, **shared))  # fmt: skip
        runs.append(FrameworkRun(policy="mixed_float16", grad_norms=[None, None, *curve[2:]], scales=scales,
                        skips=[step < 2 for step in range(steps)], accuracy=0.961, applied=steps - 2, ms_per_step=12.5,
                        twin_losses=curve, **shared))  # fmt: skip
    report = DemoReport(polyamp="0.1.0", recipes={}, baseline="float32", steps=steps, batch_size=64, seed=0, runs=runs,
                    comparisons=compare(runs, "float32"), missing={}, failures=[], seconds=12.3, ok=True)  # fmt: skip
    return msgspec.structs.replace(report, **changes)


@pytest.fixture
def runner_returns(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the runner return a given report, and collect its arguments."""
    calls: list[dict[str, Any]] = []

    def prepare(report: DemoReport) -> list[dict[str, Any]]:
        def run(recipe: polyamp.Recipe, **settings: Any) -> DemoReport:
            calls.append({"recipe": recipe, **settings})
            return report

        monkeypatch.setattr(runner, "run", run)
        return calls

    return prepare


def invoke(*arguments: str | int | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_demo_writes_its_files_and_ends_with_0(runner_returns: Any, tmp_path: Path) -> None:
    calls = runner_returns(make_report())
    result = invoke("demo", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert calls[0]["recipe"] == runner.demo_recipe()
    assert calls[0]["policies"] == ("float32", "mixed_bfloat16", "mixed_float16")
    assert json.loads((tmp_path / "report.json").read_text())["steps"] == 40
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")
    assert "| torch | mixed_float16 | 0.0500 | 96.1% | 38 | 2 | 2^13 | 12.5 |" in (tmp_path / "table.md").read_text()
    for name in ("report.json", "digits.png", "table.md"):
        assert f"wrote {tmp_path / name}" in result.output


def test_a_distance_outside_the_tolerance_ends_with_1(runner_returns: Any, tmp_path: Path) -> None:
    report = make_report()
    report.runs[2].losses[3] = 9.0
    runner_returns(msgspec.structs.replace(report, comparisons=compare(report.runs, "float32"), ok=False))
    result = invoke("demo", "--out", tmp_path)
    assert result.exit_code == 1
    assert "OUTSIDE" in result.output
    assert "not ok after 12 s" in result.output


def test_missing_and_failed_frameworks_are_named(runner_returns: Any, tmp_path: Path) -> None:
    failure = FrameworkFailure(backend="torch", policy="mixed_float16", message="the device has [no] float16")
    install = 'needs jax, which is not installed. Run: pip install "polyamp[jax]"'
    runner_returns(make_report(missing={"jax": install}, failures=[failure], ok=False))
    result = invoke("demo", "--out", tmp_path)
    assert result.exit_code == 1
    assert f"jax left out: {install}" in result.output
    assert "torch, mixed_float16 failed: the device has [no] float16" in result.output


def test_nothing_that_runs_ends_with_1_and_writes_no_picture(runner_returns: Any, tmp_path: Path) -> None:
    runner_returns(make_report(runs=[], comparisons=[], ok=False))
    result = invoke("demo", "--out", tmp_path)
    assert result.exit_code == 1
    assert "No framework could be run." in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_options_reach_the_runner(runner_returns: Any, tmp_path: Path) -> None:
    calls = runner_returns(make_report())
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('policy = "float32"\nclip_norm = 2.0\n[optimizer]\ntype = "sgd"\nlearning_rate = 0.1\n')
    jmp = "params=float32,compute=bf16,output=f32"
    result = invoke("parity", recipe, "--backends", "torch, jax", "--policies", "fp16,bf16", "--policies", jmp,
                    "--steps", 7, "--python", "jax=/bin/sh", "--timeout", 5, "--out", tmp_path)  # fmt: skip
    assert result.exit_code == 0, result.output
    (call,) = calls
    assert call["recipe"].clip_norm == 2.0
    assert call["backends"] == ["torch", "jax"]
    assert call["policies"] == ["fp16", "bf16", jmp]
    assert (call["steps"], call["timeout"], call["interpreters"]) == (7, 5.0, {"jax": "/bin/sh"})


def test_a_broken_recipe_ends_with_2_and_one_message(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("clip_norm = -1.0\n")
    result = invoke("parity", recipe)
    assert result.exit_code == 2
    assert "error: " in result.stderr
    assert "clip_norm must be None or a finite number above 0. Received: clip_norm=-1.0." in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--backends", "torhc"], "Did you mean 'torch'?"),
        (["demo", "--steps", "0"], "--steps"),
        (["demo", "--python", "torch"], "NAME=PATH"),
        (["demo", "--python", "torch=/no/such/python"], "NAME=PATH"),
        (["parity", "no_such_recipe.toml"], "no_such_recipe.toml"),
    ],
)
def test_wrong_arguments_end_with_2(arguments: list[str], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_folder_that_cannot_be_written_is_found_before_the_training(runner_returns: Any, tmp_path: Path) -> None:
    calls = runner_returns(make_report())
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "out", Path("/proc/polyamp")):
        result = invoke("demo", "--out", out)
        assert result.exit_code == 2
        assert "--out must be a folder that can be written to. Received: " in result.stderr
        assert "Traceback" not in result.output
    assert calls == []


def test_an_unknown_policy_ends_with_2(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    runner.demo_recipe().dump(recipe)
    result = invoke("parity", recipe, "--policies", "mixed_flot16")
    assert result.exit_code == 2
    assert "mixed_flot16" in result.stderr


def test_version() -> None:
    assert invoke("--version").output == f"polyamp {polyamp.__version__}\n"


WITHOUT = """
import sys
absent, sys.argv = {*sys.argv[1].split(",")}, ["polyamp", *sys.argv[2:]]

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in absent else found(name, package)
import runpy
try:
    runpy.run_module("polyamp", run_name="__main__")
finally:
    sys.stderr.write(" ".join(sorted({"numpy", "rich", "subprocess"} & {*sys.modules})))
"""
"""`python -m polyamp ...` in an interpreter without some distributions; prints its imports to standard error."""


def without(absent: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT, absent, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("arguments", [("--version",), ("--help",), ("demo", "--help"), ("doctor", "--help")])
def test_what_trains_nothing_needs_no_extra_and_no_framework(arguments: tuple[str, ...]) -> None:
    done = without("matplotlib,sklearn,torch,tensorflow,keras,jax,flax", *arguments)
    assert done.returncode == 0, done.stderr
    if arguments == ("--version",):
        assert done.stdout == f"polyamp {polyamp.__version__}\n"
        assert "numpy" not in done.stderr


def test_a_command_that_trains_names_its_extra() -> None:
    done = without("matplotlib,sklearn", "demo")
    assert done.returncode == 2
    needs = 'error: polyamp demo needs matplotlib, scikit-learn. Run: pip install "polyamp[demo]"'
    assert needs in done.stderr
    assert done.stdout == ""


def test_json_is_all_of_standard_output(runner_returns: Any, tmp_path: Path) -> None:
    report = make_report()
    runner_returns(report)
    result = invoke("demo", "--json", "--out", tmp_path)
    assert result.exit_code == 0
    assert json.loads(result.stdout) == json.loads(report.to_json())
    assert f"wrote {tmp_path}" in result.stderr


def render(report: DemoReport, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    tables.print_report(console, report)
    return str(console.file.getvalue())  # type: ignore[attr-defined]  # a StringIO


def test_the_tables_fit_80_columns_and_carry_no_colour_when_piped() -> None:
    shown = render(make_report(), 80)
    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b" not in shown
    assert "tensorflow  mixed_float16  0.0500     96.1%       38        2   2^13     12.5" in shown
    assert "float32        tensorflow - torch" in shown


def test_a_single_framework_is_said_to_have_no_peer() -> None:
    assert "nothing to compare it with" in render(make_report(comparisons=[]), 80)


def test_frameworks_that_skip_different_steps_are_said_to() -> None:
    report = make_report()
    report.runs[3].skips[30] = True
    shown = render(msgspec.structs.replace(report, comparisons=compare(report.runs, "float32")), 300)
    assert "mixed_float16: tensorflow and torch skipped different steps from step 30 on; their distance is" in shown


def test_curves_that_are_not_finite_are_shown_and_drawn(tmp_path: Path) -> None:
    from polyamp.cli.demo_charts import draw

    report = make_report()
    report.runs[1].losses[-1] = None
    report = msgspec.structs.replace(report, comparisons=compare(report.runs, "float32"))
    assert "not finite" in render(report, 100)
    draw(report, tmp_path / "digits.png")
    assert (tmp_path / "digits.png").stat().st_size > 10_000


def test_the_left_panel_of_a_row_names_what_the_row_shares(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The panels of a row have one vertical axis: its name and its numbers stand at the left one."""
    from matplotlib.figure import Figure

    from polyamp.cli.demo_charts import draw

    drawn: list[Any] = []
    write = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: (drawn.append(self), write(self, *args, **kw)))
    draw(make_report(), tmp_path / "digits.png")
    names = ["training loss (nats)", "", "relative difference of\nthe loss between frameworks", "", "loss scale"]
    assert [axes.get_ylabel() for axes in drawn[0].axes] == names
    numbered = [any(label.get_visible() for label in axes.get_yticklabels()) for axes in drawn[0].axes]
    assert numbered == [True, False, True, False, True]

"""What the benchmarks write and print: ratios, targets, tables and files; nothing is timed and no framework runs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import polyamp
from polyamp.cli.app import app

ROOT = Path(__file__).parents[3]
BENCH = ROOT / "benchmarks" / "bench.py"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def entry(own: list[float], base: list[float] | None = None, **changes: Any) -> Any:
    from benchmarks.common.results import Entry, Side

    facts: dict[str, Any] = {"section": "targets", "name": "step", "unit": "s", "own": Side("polyamp", own), **changes}
    return Entry(base=None if base is None else Side("by hand", base), **facts)


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    from benchmarks.common.results import ratio

    found = ratio([1.0, 3.0, 2.0], [2.0, 2.0, 2.0])
    assert (found.median, found.low, found.high) == (1.0, 0.5, 1.5)
    assert ratio([1.0, 2.0, 9.0], [4.0]).median == 0.5
    assert str(ratio([1.0], [2.0])) == "0.500 (0.500..0.500)"


@pytest.mark.parametrize(
    ("own", "base", "target", "unit", "verdict"),
    [
        ([1.0, 1.0], [2.0, 2.0], 0.5, "s", True),
        ([1.1, 1.1], [2.0, 2.0], 0.5, "s", False),
        ([0.01, 0.02, 0.09], None, 0.06, "s", True),
        ([0.01, 0.07, 0.09], None, 0.06, "s", False),
        ([0.0], None, 0.0, "", True),
        ([1.0], None, 0.0, "", False),
        ([1.0], [1.0], None, "s", None),
        ([0.0, 0.0, 1.0], None, 0.0, "", False),
        ([], [1.0], 1.0, "s", None),
    ],
)
def test_a_target_is_held_against_the_median_and_of_a_count_the_largest(
    own: Any, base: Any, target: Any, unit: str, verdict: bool | None
) -> None:
    from benchmarks.common.results import holds

    assert holds(entry(own, base, target=target, unit=unit)) is verdict


def test_the_table_says_what_is_not_measured_and_why() -> None:
    from benchmarks.common.results import text

    lines = text(
        [
            entry([0.001, 0.001], [0.002, 0.002], target=0.95, distance=1e-6),
            entry([], [], section="peers", name="jmp", note="does not train: loss 2.3 -> nan"),
            entry([0.05], name="import", target=0.06),
        ]
    ).splitlines()
    assert lines[0] == "polyamp against its targets"
    assert lines[4].split() == ["step", "by", "hand", "2.000", "ms", "polyamp", "1.000", "ms", "0.500",
                                "(0.500..0.500)", "<=", "0.95", "met", "1.0e-06"]  # fmt: skip
    assert lines[5].split() == ["import", "polyamp", "50.000", "ms", "<=", "60", "ms", "met"]
    assert "- jmp (by hand): does not train: loss 2.3 -> nan." in lines
    assert any(line.startswith("jmp") and line.endswith("not measured") for line in lines)


def test_markdown_holds_the_same_cells() -> None:
    from benchmarks.common.results import markdown

    lines = markdown([entry([12.0], [24.0], unit="MiB", section="memory")]).splitlines()
    assert lines[0].startswith("### Peak memory")
    assert lines[4] == "| step | by hand | 24 MiB | polyamp | 12 MiB | 0.500 (0.500..0.500) |  |  |  |"


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    from benchmarks.common.results import Results, read, write

    made = Results(script="x.py", environment={"cpus": 2}, settings={}, entries=[entry([1.0], [2.0])], seconds=1.5)
    write(tmp_path / "folder" / "x.json", made)
    assert read(tmp_path / "folder" / "x.json") == made


def test_who_reads_results_while_they_are_written_reads_them_whole(tmp_path: Path) -> None:
    from benchmarks.common.results import Results, read, write

    def made(count: int) -> Results:
        entries = [entry([1.0], [2.0])] * count
        return Results(script="x.py", environment={}, settings={}, entries=entries, seconds=1.5)

    path = tmp_path / "x.json"
    write(path, made(1))
    whole = path.read_bytes()
    with path.open("rb") as reader:
        write(path, made(2))
        assert reader.read() == whole
    assert read(path) == made(2)


def test_a_distance_of_losses_is_relative() -> None:
    from benchmarks.common.paired_timing import distance

    assert distance([2.0, 4.0], [2.0, 4.4]) == pytest.approx(0.1)
    assert distance([1.0], [float("nan")]) != distance([1.0], [float("nan")])


def test_every_part_is_a_script_and_belongs_to_a_framework() -> None:
    from benchmarks import bench

    assert [name for name in bench.PARTS if not bench.script(name).is_file()] == []
    frameworks = {name: bench.framework(name) for name in bench.PARTS}
    assert [frameworks.pop(name) for name in ("import_time", "porting")] == [None, None]
    assert all(framework == name.partition("_")[0] for name, framework in frameworks.items())


def test_nothing_in_the_folders_is_taken_for_a_framework() -> None:
    """A script's own folder comes first on its `sys.path`."""
    folders = ("torch", "jax", "tensorflow", "gpu", "common")
    names = {path.stem for folder in folders for path in (ROOT / "benchmarks" / folder).glob("*.py")} - {"__init__"}
    assert len(names) > 15
    assert [name for name in sorted(names) if importlib.util.find_spec(name) is not None] == []
    assert [name for name in folders[:3] if (ROOT / "benchmarks" / name / "__init__.py").exists()] == []


@pytest.mark.parametrize("command", ["bench.py", "gpu.py", "import_time.py", "porting.py"])
def test_the_commands_do_not_find_a_framework_that_is_not_there(command: str, tmp_path: Path) -> None:
    code = (
        "import importlib.util, runpy, sys\n"
        f"path = {str(ROOT / 'benchmarks' / command)!r}\n"
        "sys.argv, sys.path[0] = [path, '--help'], path.rpartition('/')[0]\n"
        "try: runpy.run_path(path, run_name='__main__')\n"
        "except SystemExit: pass\n"
        "sys.path = [entry for entry in sys.path if 'site-packages' not in entry]\n"
        "print([name for name in ('torch', 'jax', 'tensorflow') if importlib.util.find_spec(name)])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_part_that_fails_is_named_and_the_others_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks import bench

    (tmp_path / "import_time.py").write_text("raise SystemExit('no such processor')")
    monkeypatch.setattr(bench, "FOLDER", tmp_path)
    failure = bench.run("import_time", here=True, quick=True)
    assert isinstance(failure, bench.Failure)
    assert failure.part == "import_time"
    assert failure.message == "status 1:\nno such processor"


def test_an_unknown_part_is_refused() -> None:
    done = subprocess.run([sys.executable, str(BENCH), "--only", "mxnet"], check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "argument --only: no part starts with mxnet; parts: import_time, porting, torch_step" in done.stderr


def test_polyamp_bench_passes_its_options_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        seen.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", run)
    outcome = CliRunner().invoke(app, ["bench", "--quick", "--only", "torch,jax_step", "--out", str(tmp_path)])
    assert outcome.exit_code == 1
    assert seen == [
        [sys.executable, str(BENCH), "--out", str(tmp_path), "--quick", "--only", "torch", "jax_step"],
    ]


def test_polyamp_bench_outside_a_checkout_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(polyamp, "__file__", str(tmp_path / "polyamp" / "__init__.py"))
    outcome = CliRunner().invoke(app, ["bench"])
    assert outcome.exit_code == 2
    assert "only a checkout of the repository has" in outcome.stderr
    assert "run: make bench" in outcome.stderr

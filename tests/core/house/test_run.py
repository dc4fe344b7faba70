"""`tests/run.py`: what it says while suites run and after, on suites made for the purpose."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests import run

PYTEST = [
    sys.executable,
    "-m",
    "pytest",
    "-q",
    "-ra",
    "-p",
    "no:cacheprovider",
    "--durations=10",
    "--durations-min=0.1",
]
TESTS = """
import time, pytest

@pytest.fixture
def slow():
    time.sleep(0.2)

def test_quick(): pass
def test_slow(slow): time.sleep(0.2)

@pytest.mark.xfail(strict=True, reason="not yet")
def test_expected(): assert False
"""


@pytest.fixture
def suites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three short suites: tests that pass, one test that fails, and a command that is not pytest's."""
    for name, text in (("good", TESTS), ("bad", "def test_bad():\n    assert 1 == 2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"test_{name}.py").write_text(text)
    chosen = {
        "plain": run.Suite([sys.executable, "-c", "print('all is well')"], 1),
        "good": run.Suite([*PYTEST, str(tmp_path / "good")], 3),
        "bad": run.Suite([*PYTEST, str(tmp_path / "bad")], 2),
    }
    monkeypatch.setattr(run, "SUITES", chosen)


def test_a_suite_keeps_bytecode_where_the_environment_says_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    command = [sys.executable, "-c", "import sys; print(sys.dont_write_bytecode)"]
    monkeypatch.setattr(run, "SUITES", {"told": run.Suite(command, 1)})
    assert run.run_all(["told"], jobs=1)["told"].output == "False"


@pytest.mark.usefixtures("suites")
def test_what_is_said_while_suites_run(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = run.run_all(["plain", "bad", "good"], jobs=1)
    said = capsys.readouterr().out
    events = re.findall(r"^\d\d:\d\d:\d\d  (.*)$", said, re.MULTILINE)
    assert [re.sub(r"after \d+ s\b", "after N s", event) for event in events] == [
        "3 suites, 1 at a time",
        "good starts",
        "good done after N s, 2 passed, 1 xfailed",
        "bad starts",
        "bad FAILED (exit status 1) after N s, 1 failed",
        "plain starts",
        "plain done after N s",
    ]
    assert "not yet" in said, "what is expected to fail is named although its suite passed"
    assert "assert 1 == 2" in said, "a suite that failed shows what it printed"
    assert "all is well" not in said, "and one that passed does not"
    assert {name: (outcome.status, outcome.passed) for name, outcome in outcomes.items()} == {
        "good": (0, 2),
        "bad": (1, 0),
        "plain": (0, 0),
    }


@pytest.mark.usefixtures("suites")
def test_the_summary_has_the_slowest_tests_with_their_set_up() -> None:
    outcomes = run.run_all(["plain", "good"], jobs=2)
    ((seconds, test),) = outcomes["good"].slowest
    assert test.endswith("test_good.py::test_slow")
    assert 0.4 <= seconds < outcomes["good"].seconds
    title, longest, slowest, shortest = run.summary(outcomes).splitlines()
    assert title.split() == ["seconds", "tests", "suite"]
    assert longest.split()[1:] == ["2", "good"]
    assert slowest.split() == [f"{seconds:.1f}", test]
    assert shortest.split()[1:] == ["-", "plain"]


def test_how_far_a_suite_is() -> None:
    lines = ["....... [ 40%]", "....... [ 80%]", "..."]
    assert run.Running(0.0, lines).percent == " 80 %"
    assert run.Running(0.0, ["Success: no issues"]).percent == ""


def test_a_minute_without_an_event_is_said_in_a_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(run.time, "perf_counter", lambda: clock[0])
    screen, running = run.Screen(), {"long": run.Running(0.0, ["... [ 7%]"])}
    for clock[0] in range(125):
        screen.now(running, waiting=3)
    said = capsys.readouterr().out.splitlines()
    assert [line[10:] for line in said] == ["running: long 60 s 7 %; 3 waiting", "running: long 120 s 7 %; 3 waiting"]


def test_check_is_part_of_everything_but_for_the_smoke_tests() -> None:
    assert {name for name in run.CHECK if name not in run.ALL} == {f"smoke-{name}" for name in run.FRAMEWORKS}

"""A run with real processes, of the NumPy reference: what agrees, what parts, and every way in which a side can end."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import parity_sides as sides
import pytest

from polyamp import ArgumentError, Recipe, RecipeError
from polyamp._version import __version__
from polyamp.parity.execution import worker_messages
from polyamp.parity.execution.runner import run
from polyamp.parity.report.report import Report
from polyamp.parity.report_data import Failure
from polyamp.parity.trace import trace

STEPS = 3


def started(build: dict[str, Any], **settings: Any) -> Report:
    given = {"data": sides.batch, "loss_fn": sides.loss_fn, "recipe": sides.RECIPE, "steps": STEPS, "timeout": 120.0}
    return run(build, **{**given, **settings})


def interpreter(path: Path, *lines: str) -> Path:
    """A program in the place of a Python."""
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return path


# ---------------------------------------------------------------- what came to its end


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, list[worker_messages.ParityEvent], Path]:
    out = tmp_path_factory.mktemp("parity") / "out"
    events: list[worker_messages.ParityEvent] = []
    build = {"one": sides.plain, "the other": sides.other, "doubled": sides.doubled}
    report = started(build, out=out, on_event=events.append, recipe={
        "one": sides.RECIPE, "the other": sides.RECIPE, "doubled": sides.recipe
    })  # fmt: skip
    return report, events, out


def test_one_side_agrees_and_one_parts(good: tuple[Report, list[worker_messages.ParityEvent], Path]) -> None:
    report, _, _ = good
    assert report.failures == []
    assert not report.agrees
    same, parted = report.comparisons
    assert same.sides == ("one", "the other")
    assert same.first is None
    assert max(row.distance or 0.0 for row in same.rows) == 0.0
    first = parted.first
    assert first is not None
    assert (first.phase, first.step, first.stage, first.module, first.what) == (
        "float32",
        1,
        "forward",
        "dense0",
        "output",
    )
    assert first.kind == "factor"
    assert report.phases == ["float32", "mixed_bfloat16"]
    assert (report.steps, report.polyamp) == (STEPS, __version__)
    assert [each.side for each in report.environments] == ["one", "the other", "doubled"]
    assert report.recipes["one"]["clip_norm"] == 1.0
    assert report.recipes["doubled"]["clip_norm"] == 2.0
    curves = {(curve.side, curve.phase): curve for curve in report.curves}
    assert len(curves) == 6
    assert curves["one", "mixed_bfloat16"].loss == curves["the other", "mixed_bfloat16"].loss
    assert len(curves["doubled", "float32"].grad_norm) == STEPS
    assert 0.0 < report.own_seconds < report.seconds


def test_events_come_in_the_order_of_the_work(good: tuple[Report, list[worker_messages.ParityEvent], Path]) -> None:
    _, events, _ = good
    kinds = [
        (type(event).__name__, event.side)
        for event in events
        if not isinstance(event, worker_messages.SideFailureEvent)
    ]
    labels = ["one", "the other", "doubled"]
    assert kinds[:6] == [(kind, label) for label in labels for kind in ("SideLaunchEvent", "SideBuildEvent")]
    trained = [("SideProgressEvent", label) for label in labels for _ in range(2 * STEPS)]
    trained[2 * STEPS : 2 * STEPS] = [("SideFinishEvent", "one")]
    trained[4 * STEPS + 1 : 4 * STEPS + 1] = [("SideFinishEvent", "the other")]
    assert kinds[6:] == [*trained, ("SideFinishEvent", "doubled")]
    steps = [event for event in events if isinstance(event, worker_messages.SideProgressEvent)]
    assert [(event.phase, event.step) for event in steps[: 2 * STEPS]] == [
        (phase, step) for phase in ("float32", "mixed_bfloat16") for step in (1, 2, 3)
    ]
    assert [event.loss is None for event in steps[:STEPS]] == [True, False, False]


def test_the_folder_has_the_report_and_of_each_side_what_it_printed_and_its_trace(
    good: tuple[Report, list[worker_messages.ParityEvent], Path],
) -> None:
    report, _, out = good
    assert Report.from_json((out / "report.json").read_bytes()) == report
    assert (out / "report.html").is_file()
    names = ["0-one", "1-the-other", "2-doubled"]
    assert sorted(path.name for path in (out / "sides").iterdir()) == names
    assert (out / "sides/1-the-other/log.txt").read_text() == "built with a print to standard output\n"
    entries = list(trace.read_entries(out / "sides/2-doubled/policy.trace"))
    assert {entry.step for entry in entries} == {0, 1, 2, 3}
    assert {entry.module for entry in entries} == {"", "dense0", "dense1"}


def test_two_at_once_and_a_forward_and_backward_pass_alone() -> None:
    report = started(
        {"one": sides.plain, "two": sides.other},
        data=[sides.batch(0)["x"], sides.batch(1)["x"]],
        loss_fn=(None, None),
        recipe=None,
        names={"two": {"^dense": "dense"}},
        at_once=2,
    )
    assert report.agrees, str(report)
    assert (report.recipes, report.steps, report.phases) == ({}, 1, ["float32"])


# ---------------------------------------------------------------- what did not


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run in which almost everything goes wrong; label -> failure, and the report."""
    folder = tmp_path_factory.mktemp("bad")
    hello = 'echo \'{"type": "hello", "polyamp": "0.0.9", "python": "3.11.0"}\'; sleep 600'
    build = {
        **{each.__name__: each for each in (sides.plain, sides.segfaults, sides.killed, sides.exits, sides.raises)},
        **{each.__name__: each for each in (sides.leaves, sides.needs_flax, sides.unbuilt, sides.wider, sides.asks)},
        **dict.fromkeys(("old", "nowhere", "without", "chatty", "good"), sides.other),
        "not a number": sides.not_a_number,
        "midway": sides.midway,
        "doubled midway": sides.doubled_midway,
    }
    report = started(build, interpreters={
        "old": interpreter(folder / "old", hello),
        "nowhere": folder / "nowhere",
        "without": interpreter(folder / "without", f'exec {sys.executable} -I -S "$@"'),
        "chatty": interpreter(folder / "chatty", "echo Welcome; sleep 600"),
    }, out=folder / "out")  # fmt: skip
    return {"report": report, "folder": folder, **{failure.side: failure for failure in report.failures}}


@pytest.mark.parametrize(
    ("label", "reason", "message"),
    [
        (
            "segfaults",
            "crashed",
            "the process crashed with SIGSEGV. The end of its standard error:\nabout to segfault\nFatal",
        ),
        ("killed", "killed", "the process was killed by SIGKILL: the system does so when memory runs out."),
        (
            "exits",
            "crashed",
            "the process ended itself with exit status 0. The end of its standard error:\nabout to exit",
        ),
        ("raises", "error", "in training: ValueError: a shape that does not fit\n"),
    ],
)
def test_a_side_that_ends_in_its_second_step_is_compared_until_there(
    bad: dict[str, Any], label: str, reason: str, message: str
) -> None:
    failure: Failure = bad[label]
    assert (failure.reason, failure.phase, failure.step) == (reason, "float32", 2)
    assert failure.message.startswith(message)
    (found,) = [each for each in bad["report"].comparisons if each.sides[1] == label]
    assert found.first is not None
    assert (found.first.step, found.first.module, found.first.kind) == (1, "dense0", "factor")
    (path,) = (bad["folder"] / "out" / "sides").glob(f"*-{label}/float32.trace")
    assert {entry.step for entry in trace.read_entries(path)} == {0, 1}


@pytest.mark.parametrize(
    ("label", "reason", "message"),
    [
        ("leaves", "error", "while leaves() built the model: the code called sys.exit(3)\n"),
        ("unbuilt", "error", "while unbuilt() built the model: ValueError: a shape that does not fit\n"),
        ("needs_flax", "missing", f'flax is not installed in {sys.executable}. Run there: pip install "polyamp[jax]"'),
        ("wider", "error", "while it was matched with the first side: "),
        ("asks", "error", "while asks() built the model: EOFError"),
        ("old", "error", "old has polyamp 0.0.9, and the run was started by polyamp"),
        ("nowhere", "error", "nowhere cannot be started: No such file or directory. interpreters= "),
        ("without", "error", f"without -m pip install polyamp=={__version__}. The end of its standard error:\n"),
        ("chatty", "error", f"chatty sent what polyamp {__version__} cannot read"),
    ],
)  # fmt: skip
def test_a_side_that_never_trains_is_said_with_what_to_do(
    bad: dict[str, Any], label: str, reason: str, message: str
) -> None:
    failure: Failure = bad[label]
    assert (failure.reason, failure.phase, failure.step) == (reason, "", 0)
    assert message in failure.message


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_what_a_crashed_side_started_is_ended_too(bad: dict[str, Any]) -> None:
    assert bad["segfaults"].reason == "crashed"
    wanted = f"/bin/sleep\x009{os.getpid()}\x00".encode()
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            commands.append(path.read_bytes())
    assert any(b"pytest" in command for command in commands)
    assert wanted not in commands


def test_what_a_side_raises_is_said_with_the_line(bad: dict[str, Any]) -> None:
    assert 'parity_sides.py", line ' in bad["raises"].message
    assert bad["raises"].message.endswith('raise ValueError("a shape that does not fit")')
    assert len(bad["raises"].message.splitlines()) <= 13


def test_the_others_go_on(bad: dict[str, Any]) -> None:
    report: Report = bad["report"]
    assert not report.agrees
    assert {"plain", "good", "report", "folder"} & {failure.side for failure in report.failures} == set()
    (found,) = [each for each in report.comparisons if each.sides[1] == "good"]
    assert found.first is None
    assert {row.step for row in found.rows if row.what == "exp_avg"} <= {1, 2, 3}
    assert Report.from_json((bad["folder"] / "out" / "report.json").read_bytes()).failures == report.failures


def test_a_step_that_is_cut_off_alarms_only_where_both_sides_were(bad: dict[str, Any]) -> None:
    found = {each.sides[1]: each for each in bad["report"].comparisons}
    assert (bad["midway"].reason, bad["midway"].step) == ("killed", 2)
    assert found["midway"].first is None
    rows = {(row.module, row.what) for row in found["midway"].rows}
    assert rows >= {("dense1", "output"), ("dense1", "exp_avg"), ("", "grad_norm")}
    first = found["doubled midway"].first
    assert first is not None
    assert (first.step, first.stage, first.module, first.what) == (2, "forward", "dense0", "output")


def test_nan_on_one_side_is_where_they_part(bad: dict[str, Any]) -> None:
    (found,) = [each for each in bad["report"].comparisons if each.sides[1] == "not a number"]
    first = found.first
    assert first is not None
    assert (first.phase, first.step, first.stage, first.module, first.kind) == (
        *("float32", 2, "forward", "dense0", "not finite"),
    )
    assert first.sides["not a number"].nonfinite == first.sides["plain"].shape[0] * first.sides["plain"].shape[1]
    (curve,) = [each for each in bad["report"].curves if each.side == "not a number" and each.phase == "float32"]
    assert [number is None for number in curve.loss] == [False, False, True]  # a ReLU's output of NaN is 0


def test_a_side_that_hangs_is_ended_at_the_time_limit_and_says_where_it_was() -> None:
    report = started({"one": sides.plain, "two": sides.hangs}, timeout=15.0)
    (failure,) = report.failures
    assert (failure.side, failure.reason, failure.phase, failure.step) == ("two", "timeout", "float32", 2)
    assert failure.message.startswith("ended after the time limit of 15 s (timeout=). The end of its standard error:\n")
    assert re.search(r'parity_sides.py", line \d+ in ends\n.* in __call__\n', failure.message)
    assert report.first is not None


def test_a_first_side_that_fails_leaves_nothing_to_compare() -> None:
    report = started({"one": sides.unbuilt, "two": sides.plain})
    assert [(each.side, each.reason) for each in report.failures] == [("one", "error")]
    assert report.comparisons == []
    assert not report.agrees


def test_data_that_raises_is_said_with_its_step() -> None:
    report = started({"one": sides.plain, "two": sides.other}, data=sides.two_batches, recipe=sides.RECIPE)
    assert {(each.side, each.reason, each.phase, each.step) for each in report.failures} == {
        (side, "error", "float32", 3) for side in ("one", "two")
    }
    assert report.failures[0].message.startswith("in training: IndexError: no third batch\n")
    assert report.comparisons[0].first is None
    assert {row.step for row in report.comparisons[0].rows} <= {0, 1, 2}


def test_data_that_is_other_in_each_process_is_no_ground_for_a_comparison() -> None:
    report = started({"one": sides.plain, "two": sides.other}, data=sides.unseeded, recipe=None)
    (failure,) = report.failures
    assert (failure.side, failure.reason, failure.step) == ("two", "error", 1)
    assert failure.message.startswith("randomness in the data: data(0) gave other arrays here than in 'one', so that")
    report = started({"one": sides.plain, "two": sides.other}, data=sides.unseeded)
    assert report.failures[0].message.startswith("in training: data(0) gave other arrays at a later call.")


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"build": {"one": sides.plain}}, "build must name two sides or more. Received: one."),
        ({"build": [sides.plain]}, "build must be a dict of label -> function that makes the model"),
        ({"steps": 0}, "steps must be a whole number of at least 1. Received: steps=0."),
        ({"at_once": 0}, "at_once must be a whole number of at least 1. Received: at_once=0."),
        ({"timeout": 0}, "timeout must be a number of seconds above 0. Received: timeout=0."),
        ({"randomness": "on"}, "randomness must be 'off' or 'shared'. Received: randomness='on'."),
        (
            {"loss_fn": {"one": sides.loss_fn}},
            "loss_fn must be given for all sides or for each (one, two). Received: one.",
        ),
        (
            {"recipe": (None, None, None)},
            "all sides or for each (one, two). Received: a tuple of 3.",
        ),
        ({"names": {"one": {"a": "b"}}}, "names must be for the sides after the first (two), where each has its own."),
        ({"data": []}, "data must hold at least one batch. Received: an empty list."),
        ({"data": {"x": object()}}, "data must be made of NumPy arrays, numbers, strings, dicts, lists and tuples"),
        (
            {"interpreters": {"three": "python"}},
            "interpreters must be for labels of build (one, two). Received: three.",
        ),
        ({"options": {"step": {"compile": object()}}}, "options must be plain data such as"),
        ({"data": lambda step: step}, "data must be a function that another process can import"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(changes: dict[str, Any], message: str) -> None:
    given = {"build": {"one": sides.plain, "two": sides.plain}, "data": sides.batch, **changes}
    with pytest.raises(ArgumentError) as caught:
        run(given.pop("build"), **given)
    assert message in str(caught.value)


def test_a_recipe_that_no_file_holds_is_refused_with_the_way_to_give_it() -> None:
    class Optimizer:
        """One of a framework's own."""

    with pytest.raises(RecipeError, match=r"Optimizer\) cannot be written to a file.*def recipe\(model\): return"):
        started({"one": sides.plain, "two": sides.plain}, recipe=Recipe(optimizer=Optimizer()))
    with pytest.raises(RecipeError, match="Received: 'mixed_float16'"):
        started({"one": sides.plain, "two": sides.plain}, recipe="mixed_float16")


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="out must be a folder that can be written to"):
        started({"one": sides.plain, "two": sides.plain}, out=tmp_path / "file" / "out")

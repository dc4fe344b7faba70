"""The fixture `assert_parity` in sessions of pytest, with the reference backend on both sides."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from polyamp.parity import Report

pytest_plugins = ["pytester"]

OPTIONS = ("-p", "polyamp.parity.plugin", "-p", "no:cacheprovider")
SUITE = """
    import numpy as np
    import pytest
    import polyamp
    from polyamp.reference import MLP

    RECIPE = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(1e-2))
    OTHER = RECIPE.replace(optimizer=polyamp.adamw(1e-2, weight_decay=0.1))
    BATCH = {"x": np.ones((4, 3), np.float32), "y": np.zeros((4, 1), np.float32)}

    def build():
        return MLP.random([3, 8, 1], seed=0)

    def loss_fn(model, batch):
        return polyamp.losses.mean_squared_error(model(batch["x"]), batch["y"])

    def double_loss_fn(model, batch):
        return 2.0 * polyamp.losses.mean_squared_error(model(batch["x"]), batch["y"])

    def test_models(assert_parity):
        report = assert_parity(build(), build(), BATCH, loss_fn, RECIPE, 2)
        assert report.agrees and report.steps == 2

    def test_processes(assert_parity):
        build_both = {"reference": build, "reference again": build}
        assert assert_parity(build=build_both, data=BATCH, loss_fn=loss_fn, recipe=RECIPE).agrees

    def test_fault(assert_parity):
        assert_parity(build(), build(), BATCH, loss_fn, (RECIPE, OTHER), steps=2, labels=("ours", "theirs"))

    def test_fault_in_a_process(assert_parity):
        assert_parity(
            build={"reference": build, "reference again": build},
            data=BATCH,
            loss_fn={"reference": loss_fn, "reference again": double_loss_fn},
        )

    def test_wrong_arguments(assert_parity):
        assert_parity(build(), data=BATCH)

    def test_sides_left_out(assert_parity):
        assert_parity(build={"torch": build, "jax": build}, data=BATCH)
"""


def test_what_agrees_passes_and_what_parts_fails_with_ten_lines(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(SUITE)
    chosen = ("--polyamp-backends=reference", "--junitxml=junit.xml")
    done = pytester.runpytest_subprocess(*OPTIONS, *chosen, "--polyamp-report-dir=reports", "-rs")
    done.assert_outcomes(passed=2, failed=3, skipped=1)
    text = done.stdout.str()
    failure = text.split("_ test_fault _")[1].split("_ test_fault_in_a_process _")[0]
    lines = [line[4:] for line in failure.splitlines() if line.startswith("E   ")]
    page = pytester.path / "reports" / "test_what_agrees_passes_and_what_parts_fails_with_ten_lines.py-test_fault"
    assert lines[-1].split() == ["report", str(page / "report.html")]
    report = Report.from_json((page / "report.json").read_bytes())
    assert report.first is not None
    assert (report.first.step, report.first.stage) == (1, "update")
    said = [line.strip().removeprefix("AssertionError: ") for line in lines[:-1]]
    assert said == [line.strip() for line in str(report).splitlines()]
    assert len(lines) <= 11
    assert "asserting.py" not in text  # the traceback ends in the test
    assert "compare.py" not in text
    done.stdout.fnmatch_lines(
        [
            "E   *ArgumentError: assert_parity takes two models and a batch, as polyamp.compare does, or build= *",
            "SKIPPED*--polyamp-backends=reference leaves 0 of torch, jax",
        ]
    )
    second = text.split("_ test_fault_in_a_process _")[1]
    assert "loss" in next(line for line in second.splitlines() if line.startswith("E   "))
    found = {
        case.attrib["name"]: [p.attrib["value"] for p in case.iter("property") if p.attrib["name"] == "polyamp_report"]
        for case in ElementTree.parse(pytester.path / "junit.xml").iter("testcase")
    }
    assert found["test_fault"] == [str(page / "report.html")]
    assert found["test_models"] == []
    assert Path(found["test_fault_in_a_process"][0]).exists()

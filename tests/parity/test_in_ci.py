"""docs/guides/parity_in_ci.md and examples/parity: the example's tests pass in torch and JAX, and a fault in its model
fails as the guide shows it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from polyamp.parity import Report
from tests import xla

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "parity_in_ci.md").read_text(encoding="utf-8")


def test_the_example_passes_and_a_fault_fails_as_the_guide_shows_it(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    if xla.known():
        monkeypatch.setenv("XLA_FLAGS", xla.FLAGS)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for path in (ROOT / "examples" / "parity").glob("*.py"):
        shutil.copy(path, pytester.path)
    blocks = dict(re.findall(r"```python (\w+)\n(.*?)```", GUIDE, flags=re.DOTALL))
    pytester.makepyfile(test_fault=blocks["fault"], test_versions=blocks["versions"])
    done = pytester.runpytest_subprocess(
        *("-p", "polyamp.parity.plugin", "-p", "no:cacheprovider", "-o", "filterwarnings=default"),
        *("--polyamp-report-dir=reports", "-k", "learns or bfloat16 or fault or new_version"),
    )
    done.assert_outcomes(passed=4, failed=1, deselected=1)
    assert "polyamp: a process for each of torch (2), jax (1)" in done.stdout.str()
    lines = [line.removeprefix("E").strip() for line in done.outlines if line.startswith("E   ")]
    shown = re.search(r"```text failure\n(.*?)```", GUIDE, flags=re.DOTALL)
    assert shown is not None
    wanted = [line.removeprefix("E").strip() for line in shown[1].splitlines() if line.startswith("E   ")]
    assert lines[0] == wanted[0]  # in which words the others say it is tested where they are made
    assert [line.split()[0] for line in (lines[1], lines[2], lines[-1])] == ["module", "apart", "report"]
    assert len(lines) <= 11
    report = Report.from_json(next((pytester.path / "reports").glob("*fault*/report.json")).read_bytes())
    assert report.first is not None
    assert (report.first.phase, report.first.step, report.first.stage) == ("float32", 1, "forward")
    assert report.first.module == "norm"
    assert report.first.kind == "epsilon"

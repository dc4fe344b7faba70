"""Runs that are stopped from outside, with real processes and signals: only what was collected is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from pathlib import Path

import parity_sides as sides
import pytest

import polyamp
from polyamp.parity.execution.runner import run
from polyamp.parity.report.report import Report
from polyamp.parity.trace import trace

PATIENCE = 60.0


def wait_for(what: Callable[[], bool]) -> None:
    limit = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < limit
        time.sleep(0.02)


def alive(number: int) -> bool:
    """Whether a process is there and is more than a status that nobody took."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Script:
    """A script with a run whose third side never ends, once that has started a process of its own."""

    def __init__(self, folder: Path) -> None:
        told = folder / "told"
        self.out = folder / "out"
        self._process = subprocess.Popen(
            [sys.executable, sides.__file__, str(self.out)],
            env={**os.environ, "PARITY_TOLD": str(told), "TMPDIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_for(lambda: told.exists() or self._process.poll() is not None)
        assert self._process.poll() is None, self._process.communicate()[1]
        self.others = [int(each) for each in told.read_text().split()]
        assert all(map(alive, self.others))

    def end(self, number: int) -> str:
        """Send it a signal; what it wrote to standard error."""
        self._process.send_signal(number)
        said = self._process.communicate(timeout=PATIENCE)[1]
        wait_for(lambda: not any(map(alive, self.others)))
        return str(said)


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_ctrl_c_ends_every_process_and_leaves_the_report_of_what_was_collected(tmp_path: Path) -> None:
    script = Script(tmp_path)
    said = script.end(signal.SIGINT)
    assert said.splitlines()[-2:] == [
        "KeyboardInterrupt",
        f"polyamp.parity.run was interrupted; what was collected until then: {script.out / 'report.json'}",
    ]
    report = Report.from_json((script.out / "report.json").read_bytes())
    (failure,) = report.failures
    assert (failure.side, failure.reason, failure.phase, failure.step) == ("three", "interrupted", "float32", 2)
    assert failure.message == "the run was interrupted before this side was done"
    first = report.first
    assert first is not None
    assert (first.step, first.module, list(first.sides)) == (1, "dense0", ["one", "two"])
    assert not report.agrees
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "told"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_killed_parent_leaves_no_process_and_traces_that_can_be_read(tmp_path: Path) -> None:
    script = Script(tmp_path)
    assert script.end(signal.SIGKILL) == ""
    entries = list(trace.read_entries(script.out / "sides" / "2-three" / "float32.trace"))
    assert {entry.step for entry in entries} == {0, 1}
    wait_for(lambda: sorted(path.name for path in tmp_path.iterdir()) == ["out", "told"])


def test_a_script_that_runs_where_it_is_imported_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "my_script.py"
    script.write_text(
        "import numpy as np\n"
        "from polyamp.parity.execution.runner import run\n"
        "from polyamp.reference import MLP\n"
        "def make():\n    return MLP.random([4, 3], seed=0)\n"
        "print(run({'one': make, 'two': make}, data=np.ones((2, 4), 'f4')))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.stdout.startswith("no verdict: one ")
    said = " ".join(done.stdout.split())
    assert "parity.run is called where a worker imports the file of a function" in said
    assert 'Put the call below if __name__ == "__main__": or into another file' in said


def test_two_versions_in_two_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pythons = {}
    for label, doubled in (("library old", False), ("library new", True)):
        folder = tmp_path / label.replace(" ", "-")
        venv.create(folder, symlinks=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        root = Path(polyamp.__file__).parents[1]  # a checkout is in no environment's folder
        ours = [str(root), str(root / "backends"), *(each for each in sys.path if each.endswith("site-packages"))]
        (packages / "ours.pth").write_text("\n".join(ours))
        (packages / "scaling.py").write_text(f"DOUBLED = {doubled}\n")
        pythons[label] = folder / "bin" / "python"
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    build = {"library old": sides.scaled, "library new": sides.scaled}
    report = run(build, data=sides.batch, loss_fn=sides.loss_fn, interpreters=pythons)
    assert report.failures == []
    assert report.first is not None
    assert (report.first.module, report.first.kind) == ("dense0", "factor")
    assert list(report.first.sides) == ["library old", "library new"]

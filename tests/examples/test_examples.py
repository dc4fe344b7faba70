"""Every example runs, learns, and reports what it promises."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMISES = {
    "basic_loop.py": r"skipped steps \d+, scale \d+",
    "clip_gradients.py": r"gradient norm 0\.\d+",
    "accumulation.py": r"updates 60, aux shape \(4,\)",
    "gradient_penalty.py": r"penalty 0\.\d+",
    "two_models.py": r"updates \[(\d+), \1\], scales \[(\d+\.0), \2\]",
    "hand_written_step.py": r"$",
    "save_and_resume.py": r"bit identical True",
}
"""What follows the losses on each example's last line."""
ELSEWHERE = {"nanogpt.py", "speedrun.py", "diffusion.py"}
"""Run by a test of their own."""
ALONE = "basic_loop.py"


def test_every_example_is_tested_and_listed() -> None:
    files = {path.name for path in EXAMPLES.glob("*.py")} - {"common.py"}
    assert files == set(PROMISES) | ELSEWHERE
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in listed for name in files)


def run_alone(framework: str, name: str) -> str:
    """What the example prints, run as a user runs it."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), "--framework", framework],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str, str], str]:
    """What an example prints, run in this process: the framework is imported once for all of them."""

    def run(framework: str, name: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, "--framework", framework])
        monkeypatch.syspath_prepend(EXAMPLES)
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", PROMISES)
def test_example(framework: str, name: str, run_here: Callable[[str, str], str]) -> None:
    """Each learns and reports what it promises; one of them in a process of its own."""
    printed = (run_alone if name == ALONE else run_here)(framework, name)
    last = printed.strip().splitlines()[-1]
    found = re.fullmatch(r"loss (\d+\.\d+) -> (\d+\.\d+)(?:, (.*))?", last)
    assert found, last
    first, final, rest = float(found[1]), float(found[2]), found[3] or ""
    assert final < 0.5 * first, last
    assert re.search(PROMISES[name], rest), last

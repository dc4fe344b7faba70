"""`examples/robot` runs, and its page shows its code and what it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests import xla

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "robot"
PAGE = ROOT / "docs" / "guides" / "from_jax_to_torch.md"
WATCHED = """
import robot
table = robot.table
def watched(losses, scores):
    pairs = list(zip(losses["JAX"][-len(losses["ported"]):], losses["ported"]))[:3]
    print("first steps within", max(abs(a - b) / a for a, b in pairs))
    return table(losses, scores)
robot.table = watched
robot.main()
"""
"""The example, which also says how far the first steps after the port are apart: later ones part by rounding, the more
the larger the learning rate."""
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def printed() -> str:
    """What a short run prints, in a process of its own: it imports two frameworks."""
    quick = {"XLA_FLAGS": xla.FLAGS} if xla.known() else {}
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, "--steps", "60", "--float16-steps", "0"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **quick},
        cwd=EXAMPLE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def blocks(language: str) -> list[str]:
    """The page's blocks in one language."""
    return [text for found, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")) if found == language]


def without_figures(text: str) -> str:
    """The text without measured errors, which hang on the machine, and the parameters that happen to have the worst."""
    return re.sub(r"\d\.\de[+-]\d+( \(\w+(/\w+)+\)$)?", "#", text, flags=re.MULTILINE)


def test_the_page_shows_the_code_of_the_example() -> None:
    code = textwrap.dedent("\n".join(path.read_text(encoding="utf-8") for path in sorted(EXAMPLE.glob("*.*"))))
    lines = [line.strip() for line in code.splitlines()]
    shown = [*blocks("python"), *blocks("toml")]
    assert len(shown) >= 4
    for block in shown:
        wanted = [line.strip() for line in block.strip().splitlines()]
        found = any(lines[start : start + len(wanted)] == wanted for start in range(len(lines)))
        assert found, block


def test_the_page_shows_what_the_example_prints(printed: str) -> None:
    """Every report, but for its figures; the table's are those of the long run."""
    reports = [block for block in blocks("text") if "reached" not in block]
    assert len(reports) == 5
    for block in reports:
        assert without_figures(block) in without_figures(printed), block
    table = next(block for block in blocks("text") if "reached" in block)
    names = [line[:34] for line in table.splitlines()]
    assert all(name in printed for name in names[:6])


def test_torch_goes_on_where_jax_stopped(printed: str) -> None:
    """The first losses after the port are JAX's: the weights, the moments and the schedule came along."""
    found = re.search(r"first steps within (\S+)", printed)
    assert found, printed
    assert float(found[1]) < 0.02

"""docs/guides/comparing_models.md tells the truth: its blocks run in order in one process and print what stands there,
but for figures, and for the wording of what a difference looks like."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests import xla

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "comparing_models.md").read_text(encoding="utf-8")


LABELS = ("module", "apart", "looks like", "lines", "because")


def plain(text: str) -> list[str]:
    """The lines: the first of a report whole, of its others some labels alone."""
    lines = [line for line in text.splitlines() if not line.startswith(" ") or line.strip().startswith(LABELS)]
    return [next((label for label in LABELS if line.strip().startswith(label)), line) for line in lines]


def test_the_blocks_run_and_print_what_stands_there(tmp_path: Path) -> None:
    blocks = re.findall(r"```(python|text)\n(.*?)```", GUIDE, flags=re.DOTALL)
    script = tmp_path / "guide.py"
    script.write_text("\n".join(text for kind, text in blocks if kind == "python"), encoding="utf-8")
    flags = {"XLA_FLAGS": xla.FLAGS} if xla.known() else {}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **flags},
    )
    assert done.returncode == 0, done.stderr
    assert plain(done.stdout) == plain("".join(text for kind, text in blocks if kind == "text"))

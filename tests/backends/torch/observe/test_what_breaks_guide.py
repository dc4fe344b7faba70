"""docs/guides/what_breaks_in_16_bits.md: run as a file, it prints what its text blocks show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

GUIDE = (Path(__file__).parents[4] / "docs" / "guides" / "what_breaks_in_16_bits.md").read_text(encoding="utf-8")


def test_every_tool_gives_the_answer_that_the_page_shows(tmp_path: Path) -> None:
    blocks = re.findall(r"^```(python|text)\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text("\n".join(text for kind, text in blocks if kind == "python"), encoding="utf-8")
    command = [sys.executable, "-W", "ignore", script.name]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.replace(f"{tmp_path}{os.sep}", "")
    assert printed == "".join(text for kind, text in blocks if kind == "text")


def test_the_page_is_short() -> None:
    assert len(GUIDE.split()) <= 900

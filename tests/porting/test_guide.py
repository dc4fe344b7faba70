"""docs/guides/moving_models.md tells the truth: its blocks run in order in one process and print what stands there. The
table of docs/reference/canonical_layout.md is the one of `polyamp.porting.layouts.layer_kinds`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from polyamp.porting.layouts.layer_kinds import KINDS

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "moving_models.md").read_text(encoding="utf-8")
LAYOUT = (ROOT / "docs" / "reference" / "canonical_layout.md").read_text(encoding="utf-8")


def test_the_blocks_run_and_print_what_stands_there(tmp_path: Path) -> None:
    blocks = re.findall(r"```(python|text)\n(.*?)```", GUIDE, flags=re.DOTALL)[1:]  # the first is a line alone
    assert [kind for kind, _ in blocks[:2]] == ["python", "text"]
    script = tmp_path / "guide.py"
    script.write_text("\n".join(text for kind, text in blocks if kind == "python"), encoding="utf-8")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    wanted = "".join(text for kind, text in blocks if kind == "text")
    pattern = re.escape(wanted).replace(re.escape("..."), r"[-+.e0-9]+")
    assert re.fullmatch(pattern, done.stdout), done.stdout


def test_the_table_is_the_one_of_the_code() -> None:
    rows = []
    for name, kind in KINDS.items():
        arrays = ", ".join(
            f"`{array}` ({', '.join(axes)})" + (" ?" if array in kind.optional else "")
            for array, axes in kind.arrays.items()
        )
        rows.append(f"| {name} | {arrays or '–'} | {', '.join(kind.attributes) or '–'} |")  # noqa: RUF001  # a dash
    table = LAYOUT.split("| kind | arrays |")[1].split("|---|---|---|\n")[1].split("\n\n")[0]
    assert table.splitlines() == rows

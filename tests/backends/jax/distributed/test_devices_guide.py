"""The blocks of docs/guides/jax_devices.md run in order, on four devices of one CPU, and print what the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[4] / "docs" / "guides" / "jax_devices.md"


def test_s09_the_blocks_run_and_print_what_stands_there(tmp_path: Path) -> None:
    pairs = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text("".join(code for code, _ in pairs), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(printed for _, printed in pairs) == "3 ('data',) ('data',)\n3 True\n"

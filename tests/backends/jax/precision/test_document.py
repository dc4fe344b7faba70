"""docs/guides/jax_autocast.md tells the truth: its Python blocks run, in order, and print what its text blocks show.

That its op lists are the code's is asserted in `test_op_rules`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
DOCUMENT = (ROOT / "docs" / "guides" / "jax_autocast.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
"""(language, text) of every fenced block."""


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    assert {language for language, _ in BLOCKS} == {"python", "text"}


def test_python_blocks_run_in_order_and_print_the_text_blocks(tmp_path: Path) -> None:
    script = tmp_path / "jax_autocast.py"
    script.write_text("\n".join(text for language, text in BLOCKS if language == "python"), encoding="utf-8")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    for language, text in BLOCKS:
        if language == "text":
            assert text in done.stdout

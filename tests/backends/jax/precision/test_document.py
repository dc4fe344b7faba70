"""The guides to JAX tell the truth: their Python blocks run, in order, and print what their text blocks show.

That the op lists of docs/reference/jax_op_list.md are the code's is asserted in `test_op_rules`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
GUIDES = ("equinox", "jax_autocast", "jax_loop", "jax_models")


def blocks(guide: str) -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    document = (ROOT / "docs" / "guides" / f"{guide}.md").read_text(encoding="utf-8")
    return re.findall(r"^```(\w*)\n(.*?)^```$", document, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("guide", GUIDES)
def test_every_block_is_of_a_kind_that_is_tested(guide: str) -> None:
    assert {language for language, _ in blocks(guide)} <= {"python", "text"}


@pytest.mark.parametrize("guide", GUIDES)
def test_python_blocks_run_in_order_and_print_the_text_blocks(guide: str, tmp_path: Path) -> None:
    script = tmp_path / f"{guide}_page.py"  # equinox.py would be what it imports
    script.write_text("\n".join(text for language, text in blocks(guide) if language == "python"), encoding="utf-8")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    for language, text in blocks(guide):
        if language == "text":
            assert text in done.stdout

"""The README tells the truth: every code block in it runs, in every framework, and its links and commands exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)(?: (\w+))?\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
"""(language, framework or "", text) of every fenced block."""


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    assert {(language, framework) for language, framework, _ in BLOCKS} == {
        ("sh", ""),
        ("python", ""),
        ("python", "torch"),
        ("python", "tensorflow"),
        ("python", "jax"),
        ("text", ""),
    }


@pytest.mark.parametrize("framework", ["torch", "tensorflow", "jax"])
def test_python_blocks_run_in_order(framework: str, tmp_path: Path) -> None:
    chosen = [text for language, name, text in BLOCKS if language == "python" and name in ("", framework)]
    script = tmp_path / "readme.py"
    script.write_text("\n".join(chosen), encoding="utf-8")
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.endswith(("True", "False"))]
    loss, scale, skipped = line.split()
    assert 0.0 < float(loss) < 10.0
    assert float(scale) in {2.0**exponent for exponent in range(12, 16)}, "three steps halve 2^15 at most three times"
    assert skipped in ("True", "False")
    if framework == "jax":
        printed = [text for language, _, text in BLOCKS if language == "text"]
        assert printed
        assert [text for text in printed if text not in done.stdout] == []


def test_shell_commands_are_targets_of_the_makefile() -> None:
    """`make test` is what runs this test; `make demo` runs for real, with few steps."""
    lines = [line.partition("#")[0].strip() for language, _, text in BLOCKS if language == "sh"
             for line in text.splitlines()]  # fmt: skip
    assert lines == ["make demo", "make test"]
    for line in lines:
        done = subprocess.run([*line.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_links_lead_somewhere() -> None:
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in target]
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_the_demo_table_is_there() -> None:
    table = README.partition("<!-- demo-table -->")[2].partition("<!-- /demo-table -->")[0]
    for word in ("torch", "tensorflow", "jax", "float32", "mixed_bfloat16", "mixed_float16"):
        assert word in table

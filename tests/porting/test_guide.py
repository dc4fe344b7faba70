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


def run(script: Path) -> subprocess.CompletedProcess[str]:
    """Run a file in a process of its own, in its folder."""
    command = [sys.executable, "-W", "ignore", str(script)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    folder = script.parent
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=environment, cwd=folder
    )


def test_the_blocks_run_and_print_what_stands_there(tmp_path: Path) -> None:
    blocks = re.findall(r"```(python|text)\n(.*?)```", GUIDE, flags=re.DOTALL)[1:]  # the first is a line alone
    assert [kind for kind, _ in blocks[:2]] == ["python", "text"]
    script = tmp_path / "guide.py"
    script.write_text("\n".join(text for kind, text in blocks if kind == "python"), encoding="utf-8")
    done = run(script)
    assert done.returncode == 0, done.stderr
    wanted = "".join(text for kind, text in blocks if kind == "text")
    pattern = re.escape(wanted).replace(re.escape("..."), r"[-+.e0-9]+")
    assert re.fullmatch(pattern, done.stdout), done.stdout


BEFORE = """
from pathlib import Path

import jax
import jax.numpy as jnp
import torch
from flax import linen

import polyamp

recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.adamw(1e-3))
Path("recipe.toml").write_text(recipe.to_toml())
state = polyamp.init(torch.nn.Sequential(torch.nn.Linear(4, 3)), recipe)
module = linen.Sequential([linen.Dense(3)])
variables = module.init(jax.random.key(0), jnp.ones((1, 4)))
"""
"""What the first two blocks of docs/guides/moving_a_training.md, one for each place, have at hand."""


def test_a_training_moves_by_the_file_as_the_guide_says(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "guides" / "moving_a_training.md").read_text(encoding="utf-8")
    save, read = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)[:2]
    (tmp_path / "guide.py").write_text(BEFORE + save + read + "assert int(state.step) == 0\n", encoding="utf-8")
    done = run(tmp_path / "guide.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 layer moved\n"), done.stdout


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

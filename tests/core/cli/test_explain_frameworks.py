"""`polyamp explain --diff torch jax FILE`: a process for each framework, the guide's output, and wrong files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest
from typer.testing import CliRunner

from polyamp.cli.app import app

GUIDE: Final = (Path(__file__).parents[3] / "docs" / "guides" / "explain.md").read_text(encoding="utf-8")


def test_the_guides_two_frameworks(tmp_path: Path) -> None:
    file = tmp_path / "models.py"
    file.write_text("print('made')\n" + re.findall(r"```python\n(# models\.py.*?)```", GUIDE, re.DOTALL)[0])
    shown = CliRunner().invoke(app, ["explain", str(file), "--diff", "torch", "jax"])
    assert shown.exit_code == 0, shown.output
    assert f"```text\n{shown.stdout}```" in GUIDE


def test_what_is_wrong_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "models.py"
    file.write_text("build, loss_fn, batch = {'torch': print}, None, None")
    command = ["explain", str(file), "--diff", "jax", "torch"]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2
    assert "jax could not be explained (exit status 2); see above." in refused.output
    assert "Received: torch, without 'jax'." in capfd.readouterr().err
    absent = CliRunner().invoke(app, [*command, "--python", f"jax={tmp_path / 'none'}"])
    assert absent.exit_code == 2
    assert f"--python jax={tmp_path / 'none'} cannot be started: No such file or directory." in absent.output
    mixed = CliRunner().invoke(app, ["explain", str(file), "--diff", "torch", "mixed_float16"])
    assert "--diff takes two policies, `eager compiled`, or two frameworks." in mixed.output
    drawn = CliRunner().invoke(app, [*command, "--save", str(tmp_path / "page.html")])
    assert "--save draws one report." in drawn.output

"""`polyamp explain FILE`: the table, the difference of two policies, JSON, the page, and wrong files."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from polyamp.cli import app as cli

FILE = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
batch = torch.ones(5, 4), torch.zeros(5, dtype=torch.int64)


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(FILE)
    page = tmp_path / "casts.html"
    shown = CliRunner().invoke(cli.app, ["explain", str(file), "--save", str(page)])
    assert shown.exit_code == 0, shown.output
    assert "compute='float16'" in shown.output
    assert "native_layer_norm" in shown.output
    assert "operations of each module by dtype" in page.read_text()
    data = json.loads(
        CliRunner().invoke(cli.app, ["explain", str(file), "--policy", "mixed_bfloat16", "--json"]).stdout
    )
    assert {row["dtype"] for row in data["operations"] if row["name"] == "addmm"} == {"bfloat16"}
    differs = CliRunner().invoke(cli.app, ["explain", str(file), "--diff", "mixed_float16", "mixed_bfloat16"])
    lines = [line.split() for line in differs.stdout.splitlines()]
    assert lines[0] == ["module", "operation", "direction", "mixed_float16", "mixed_bfloat16"]
    assert ["0", "addmm", "forward", "float16", "bfloat16"] in lines
    assert not any("native_layer_norm" in line for line in lines)
    same = CliRunner().invoke(cli.app, ["explain", str(file), "--diff", "float32", "float32"])
    assert "every operation runs in the same dtype" in same.stdout


def test_wrong_files(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("model = 1")
    assert "FILE must define model, loss_fn, batch" in " ".join(
        CliRunner().invoke(cli.app, ["explain", str(file)]).output.split()
    )
    assert CliRunner().invoke(cli.app, ["explain", str(tmp_path / "none.py")]).exit_code == 2

"""`polyamp explain FILE`: the table, the difference of two policies, JSON, the page, and wrong files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

from typer.testing import CliRunner

from polyamp.cli import app as cli

GUIDE: Final = (Path(__file__).parents[4] / "docs" / "guides" / "explain.md").read_text(encoding="utf-8")
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


def test_eager_and_compiled(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(re.findall(r"```python\n(# model\.py.*?)```", GUIDE, re.DOTALL)[0])
    command = ["explain", str(file), "--policy", "mixed_bfloat16", "--diff", "eager", "compiled"]
    shown = CliRunner().invoke(cli.app, command)
    assert shown.exit_code == 0, shown.output
    assert f"```text\n{shown.output}```" in GUIDE
    data = json.loads(CliRunner().invoke(cli.app, [*command, "--json"]).stdout)
    assert data["compared"] == 17
    assert data["without_counterpart"] == {"eager": [], "compiled": []}
    assert data["differences"][0] == {
        "module": "body/1",
        "family": "normalisation",
        "direction": "forward",
        "first": "float32",
        "second": "bfloat16, float32",
        "first_operations": "native_layer_norm",
        "second_operations": "native_layer_norm",
    }
    for wrong in (["eager", "mixed_float16"], ["torch", "mixed_float16"]):
        refused = CliRunner().invoke(cli.app, ["explain", str(file), "--diff", *wrong])
        assert refused.exit_code == 2
        assert f"Received: {' '.join(wrong)}." in refused.output


def test_wrong_files(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("model = 1")
    assert "FILE must define model, loss_fn, batch" in " ".join(
        CliRunner().invoke(cli.app, ["explain", str(file)]).output.split()
    )
    assert CliRunner().invoke(cli.app, ["explain", str(tmp_path / "none.py")]).exit_code == 2

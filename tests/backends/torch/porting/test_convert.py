"""`polyamp port` with torch's files as sources and targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from polyamp.cli.app import app
from polyamp.porting.files.file_formats import file_inventory

BUILDER = """
import torch
from torch import nn
def build(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2)).to(torch.bfloat16)
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "torch_nets.py").write_text(BUILDER)
    import torch_nets  # type: ignore[import-not-found]

    torch.save(torch_nets.build(0).state_dict(), "source.pt")
    torch.save(torch_nets.build(2).state_dict(), "other.pt")
    return torch.load("source.pt")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["port", *arguments])


def same(path: str, expected: Any) -> bool:
    found = torch.load(path)
    return list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_state_dict_goes_through_the_canonical_layout_and_back(source: Any) -> None:
    result = run("source.pt", "canonical.safetensors")
    assert (result.exit_code, "do not say what 1 is. Give --into" in result.stderr) == (1, True)
    assert run("source.pt", "canonical.safetensors", "--into", "torch_nets:build").exit_code == 0
    assert run("canonical.safetensors", "new.pt", "--like", "other.pt").exit_code == 0
    assert same("new.pt", source)
    assert not same("other.pt", source)
    assert run("canonical.safetensors", "built.pt", "--into", "torch_nets:build").exit_code == 0
    assert same("built.pt", source)
    result = run("canonical.safetensors", "built.safetensors", "--into", "torch_nets:build", "--to", "torch")
    assert result.exit_code == 0, result.output
    assert run("built.safetensors", "other.pt", "--like", "other.pt").exit_code == 0
    assert same("other.pt", source)


def test_a_file_that_does_not_fit_leaves_the_target(source: Any, tmp_path: Path) -> None:
    run("source.pt", "canonical.safetensors", "--into", "torch_nets:build")
    other = {name: tensor for name, tensor in source.items() if not name.startswith("2.")}
    torch.save(other, "less.pt")
    for options, said in (
        (("canonical.safetensors", "less.pt", "--like", "less.pt"), "2"),
        (("canonical.safetensors", "less.keras", "--into", "torch_nets:build"), "makes a model of torch"),
    ):
        result = run(*options)
        assert result.exit_code == 1
        assert said in result.stderr
    assert same("less.pt", other)
    assert not (tmp_path / "less.keras").exists()


def test_safetensors_whose_length_begins_as_a_pickle_does(tmp_path: Path) -> None:
    header = b'{"0.weight":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]}}'.ljust(0x280)
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert [layer.path for layer in file_inventory(path).layers] == ["0"]

"""torch's files: a state_dict and safetensors with torch's names, whose layers are known by names and shapes."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import polyamp
from polyamp.errors import PortError
from polyamp.porting import Lazy
from polyamp.porting.convert import convert
from polyamp.porting.files import safetensors_file
from polyamp.porting.layouts.inventory import Inventory
from polyamp_torch.porting.converter import TorchConverter
from tests.porting.layers import torch_layers

CONVERTER = TorchConverter()


class GPT2(nn.Module):
    """The names and shapes of transformers' GPT-2, whose dense layers hold inputs first."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, 8)
        self.wpe = nn.Embedding(8, 8)
        self.attn = nn.ModuleDict({"c_attn": Conv1D(8, 24), "c_proj": Conv1D(8, 8)})
        self.mlp = nn.ModuleDict({"c_fc": Conv1D(8, 32), "c_proj": Conv1D(32, 8)})
        self.ln_f = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.lm_head.weight = self.wte.weight


class Conv1D(nn.Module):
    """A dense layer of (inputs, features)."""

    def __init__(self, inputs: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, features))
        self.bias = nn.Parameter(torch.randn(features))


class Mixed(nn.Module):
    """Layers of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.depthwise = nn.Conv2d(4, 8, 3, groups=4, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.groups = nn.GroupNorm(2, 8)
        self.square = nn.Linear(8, 8)
        self.rnn = nn.LSTM(8, 4, num_layers=2, bidirectional=True)
        self.gru = nn.GRU(8, 4, bias=False)
        self.cell = nn.RNNCell(8, 4)
        self.projected = nn.LSTM(8, 4, proj_size=2)
        self.attention = nn.MultiheadAttention(8, 2)
        self.cross = nn.MultiheadAttention(8, 2, kdim=4, vdim=6, bias=False)
        self.scale = nn.Parameter(torch.randn(()))
        self.register_buffer("order", torch.arange(3))


def forms(found: Inventory) -> dict[str, list[str]]:
    return {layer.path: list(dict.fromkeys(form.kind for form in layer.forms)) for layer in found.layers}


def saved(model: nn.Module, path: Path) -> Path:
    CONVERTER.write_model(path, model)
    return path


def values(found: Inventory) -> dict[str, Any]:
    return {leaf.name: leaf.array.read() for layer in found.layers for leaf in layer.leaves.values()}


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_the_layers_of_a_file_are_those_of_the_model(suffix: str, tmp_path: Path) -> None:
    model = Mixed()
    found = CONVERTER.open_file(saved(model, tmp_path / f"model{suffix}"))
    assert found.ordered == (suffix == ".pt")
    assert found.left == {
        "norm/num_batches_tracked": "counts batches; torch alone keeps it",
        "order": "whole numbers or flags",
    }
    assert forms(found)["square"] == ["dense"]
    assert forms(found)["up"] == ["conv_transpose"]
    assert forms(found)["depthwise"] == ["conv", "conv_transpose"]
    assert forms(found)["groups"] == ["layer_norm", "group_norm"]
    there = {layer.path: layer for layer in found.layers}
    own = CONVERTER.inventory(model).layers
    assert {layer.path for layer in own} == set(there)
    for layer in own:
        other, form = there[layer.path], layer.forms[0]
        like = next(
            each
            for each in other.forms
            if each.kind == form.kind and each.shapes(other.arrays) == form.shapes(layer.arrays)
        )
        assert like.rules == form.rules
        assert {name: leaf.name for name, leaf in other.leaves.items()} == {
            name: leaf.name for name, leaf in layer.leaves.items()
        }
        assert all(np.array_equal(other.arrays[name].read(), array.read()) for name, array in layer.arrays.items())
        assert {leaf.trainable for leaf in other.leaves.values()} == {leaf.trainable for leaf in layer.leaves.values()}
    reverse = there["rnn/layer_1/backward"].forms[0].attributes
    assert reverse["reverse"]


def test_matrices_that_hold_inputs_first(tmp_path: Path) -> None:
    found = CONVERTER.open_file(saved(GPT2(), tmp_path / "model.pt"))
    there = {layer.path: layer for layer in found.layers}
    for name in ("attn/c_attn", "attn/c_proj", "mlp/c_fc", "mlp/c_proj"):
        (form,) = there[name].forms
        assert form.rules[0].operations == ()  # the square one too, by the one of its name that is not
    assert forms(found)["wte"] == ["embedding", "dense"]
    assert forms(found)["lm_head"] == ["dense", "embedding"]
    assert there["lm_head"].leaves["weight"].tied == "wte/weight"
    assert "lm_head" not in forms(CONVERTER.open_file(saved(GPT2(), tmp_path / "model.safetensors")))


@pytest.mark.parametrize("wrap", ["model", "state_dict", "prefixes", "checkpoint"])
def test_where_checkpoints_keep_a_model(wrap: str, tmp_path: Path) -> None:
    state = nn.Sequential(nn.Linear(2, 3)).state_dict()
    whole: Any = {wrap: state, "epoch": 3}
    if wrap == "prefixes":
        whole = {f"module._orig_mod.{name}": tensor for name, tensor in state.items()}
    if wrap == "checkpoint":
        whole = {"step": torch.tensor(3.0), "model": state}
    torch.save(whole, tmp_path / "model.pth")
    found = CONVERTER.open_file(tmp_path / "model.pth")
    assert sorted(values(found)) == ["0/bias", "0/weight"]
    new = {"0/bias": Lazy.of(np.arange(3, dtype="float32"))}
    CONVERTER.write_file(tmp_path / "model.pth", new, tmp_path / "model.pth")
    again = torch.load(tmp_path / "model.pth", weights_only=True)
    inner = again if wrap == "prefixes" else again["model" if wrap == "checkpoint" else wrap]
    assert next(value for name, value in inner.items() if name.endswith("0.bias")).tolist() == [0.0, 1.0, 2.0]
    assert torch.equal(next(value for name, value in inner.items() if name.endswith("weight")), state["0.weight"])
    assert list(again) == list(whole)


@pytest.mark.parametrize("suffix", [".bin", ".safetensors"])
def test_a_file_is_written_as_another_one_is(suffix: str, tmp_path: Path) -> None:
    like = saved(GPT2().bfloat16(), tmp_path / f"like{suffix}")
    before = values(CONVERTER.open_file(like))
    new = {name: Lazy.of((array * 2).astype("float32")) for name, array in before.items() if name != "lm_head/weight"}
    path = tmp_path / f"new{suffix}"
    CONVERTER.write_file(path, new, like)
    after = values(CONVERTER.open_file(path))
    assert {array.dtype.name for array in after.values()} == {"float32"}
    assert all(np.array_equal(after[name], array.read()) for name, array in new.items())
    assert values(CONVERTER.open_file(like)).keys() == after.keys()
    if suffix == ".bin":
        state = torch.load(path, weights_only=True)
        assert isinstance(state, OrderedDict)
        assert state["lm_head.weight"].data_ptr() == state["wte.weight"].data_ptr()
        GPT2().load_state_dict(state)
    else:
        assert safetensors_file.read(path).metadata["format"] == "pt"
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([like.name, path.name])


def test_files_as_sources_of_a_port(tmp_path: Path) -> None:
    for case in ("lstm_bidirectional", "attention", "conv_transpose2d", "flatten", "tied_head", "prelu"):
        model, target = torch_layers.BUILD[case](), torch_layers.BUILD[case]()
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.zero_()
        for suffix in (".pt", ".safetensors"):
            path = tmp_path / f"{case}{suffix}"
            polyamp.port(saved(model, path), target)
            state = target.state_dict()
            assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_a_layer_that_names_do_not_tell_is_not_written_without_a_model(tmp_path: Path) -> None:
    """A scale and a bias are a layer norm's or a group norm's."""
    for count, named in ((1, "0 is"), (7, "0, 1, 2, 3, 4 is (and 2 more)")):
        source = saved(nn.Sequential(*(nn.LayerNorm(8) for _ in range(count))), tmp_path / "model.pt")
        assert set(map(tuple, forms(CONVERTER.open_file(source)).values())) == {("layer_norm", "group_norm")}
        with pytest.raises(PortError) as raised:
            convert(source, tmp_path / "new.safetensors")
        assert str(raised.value) == (
            f"{source} holds names and shapes, which do not say what {named}. Give --into package.module:build, a "
            "function that makes the model: it says so."
        )
        assert not (tmp_path / "new.safetensors").exists()


def test_a_file_with_a_flipped_bit_fills_nothing(tmp_path: Path) -> None:
    model, target = nn.Linear(64, 64), nn.Linear(64, 64)
    path = saved(model, tmp_path / "model.pt")
    content = bytearray(path.read_bytes())
    start = content.index(model.weight.detach().numpy()[3].tobytes())
    content[start + 5] ^= 1
    path.write_bytes(content)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    assert forms(CONVERTER.open_file(path)) == {"": ["dense"]}  # looked at when it is read
    with pytest.raises(PortError, match=r"model.pt is damaged: BadZipFile: Bad CRC-32 for file 'archive/data/0'"):
        polyamp.port(path, target)
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())


class Opened:
    """What no file may bring along."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("run",)


def test_what_cannot_be_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(content: Any, message: str) -> None:
        path = tmp_path / "model.pt"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)
        with pytest.raises(PortError, match=message):
            CONVERTER.open_file(path)

    refused({"model": Opened()}, "cannot be read without running code that is in it")
    refused(pickle.dumps(Opened(), protocol=2), "cannot be read without running code that is in it")
    assert "run" not in capsys.readouterr().out
    refused({"epoch": 3, "best": 0.5}, "holds no model's state_dict: it is a dict of 2 with 'epoch', 'best'|'epoch'")
    refused([torch.zeros(2)], "holds no model's state_dict: it is a list of 1")
    refused({"weight_g": torch.zeros(2), "weight_v": torch.zeros(2, 2)}, "computes from other arrays")
    whole = saved(Mixed(), tmp_path / "whole.pt").read_bytes()
    for length in (5, 100, len(whole) // 2, len(whole) - 1):
        refused(whole[:length], "is damaged")
    refused(whole[: len(whole) // 2] + bytes(300) + whole[len(whole) // 2 :], "is damaged")
    refused(b"\x80\x02", "is damaged")
    with pytest.raises(FileNotFoundError):
        CONVERTER.open_file(tmp_path / "none.pt")
    like = saved(nn.Linear(2, 3), tmp_path / "like.pt")
    for name, shape, path, message in (
        ("gone", (3,), "new.pt", "has no array 'gone'"),
        ("bias", (4,), "new.pt", r"'bias' is \[3\] in .*like.pt. Received: \[4\]"),
        ("bias", (3,), "new.safetensors", "would be another kind of file"),
        ("bias", (3,), "new.onnx", r"torch has no file of suffix '\.onnx'"),
    ):
        with pytest.raises(PortError, match=message):
            CONVERTER.write_file(tmp_path / path, {name: Lazy.of(np.zeros(shape, "float32"))}, like)
        assert not (tmp_path / path).exists()

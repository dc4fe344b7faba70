"""What the inventory of a torch model says: paths, ties, what is left, attributes, and what it refuses."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import polyamp
from polyamp.errors import ModelError, PortError
from polyamp.porting import Form, Rule, register
from polyamp.porting.layouts.inventory import Inventory, NativeLayer
from polyamp_torch.porting.converter import CONVERTER

inventory = CONVERTER.inventory


def kinds(found: Inventory) -> dict[str, str]:
    return {layer.path: layer.forms[0].kind for layer in found.layers}


def layer(found: Inventory, path: str) -> NativeLayer:
    (only,) = (each for each in found.layers if each.path == path)
    return only


def attributes(model: nn.Module) -> dict[str, Any]:
    (only,) = inventory(model).layers
    return dict(only.forms[0].attributes)


def check_whole(model: nn.Module) -> None:
    """Every parameter and buffer stands in one leaf, or is left; the rules of a layer name its arrays once."""
    found = inventory(model)
    names = Counter(leaf.name for each in found.layers for leaf in each.leaves.values())
    names.update(list(found.left))
    state = [*model.named_parameters(), *model.named_buffers()]
    assert names >= Counter(name.replace(".", "/") for name, _ in state)
    assert set(names.values()) <= {1}
    for each in found.layers:
        for form in each.forms:
            assert sorted(name for rule in form.rules for name in rule.native) == sorted(each.leaves)
            assert len(form.shapes(each.arrays)) == sum(len(rule.canonical) for rule in form.rules)
    assert len({each.path for each in found.layers}) == len(found.layers)


class Model(nn.Module):
    """A bit of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.embedding = nn.Embedding(11, 8)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True), 2, enable_nested_tensor=False
        )
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))
        self.named = nn.ParameterDict({"one": torch.zeros(3), "two": torch.zeros(2)})
        self.norm = nn.BatchNorm1d(8)
        self.pair = nn.Bilinear(8, 8, 2)
        self.rnn = nn.LSTM(8, 4, num_layers=2, bidirectional=True, dropout=0.25)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.again = self.blocks[0]
        self.register_buffer("average", torch.ones(3))
        self.register_buffer("order", torch.arange(3))
        self.register_buffer("mask", torch.ones(3), persistent=False)


def test_every_array_is_in_one_place() -> None:
    check_whole(Model())
    found = inventory(Model())
    assert found.framework == "torch"
    assert found.ordered
    of = kinds(found)
    assert of["token"] == of["named/two"] == of["pair/weight"] == of["pair/bias"] == of["average"] == "parameter"
    assert of["encoder/layers/1/self_attn"] == "attention"
    assert "encoder/layers/1/self_attn/out_proj" not in of
    assert [path for path in of if path.startswith("rnn")] == [
        *("rnn/layer_0/forward", "rnn/layer_0/backward"),
        *("rnn/layer_1/forward", "rnn/layer_1/backward"),
    ]
    assert list(of)[:3] == ["token", "average", "embedding"]
    assert not any(path.startswith("again") for path in of)  # the module is listed once
    assert found.left == {
        "order": "whole numbers or flags, which the model makes itself",
        "mask": "no part of checkpoints (persistent=False): the model makes it itself",
        "norm/num_batches_tracked": "counts batches; torch alone keeps it",
    }


def test_leaves_say_what_they_are() -> None:
    found = inventory(Model())
    head, norm, average = layer(found, "head"), layer(found, "norm"), layer(found, "average")
    assert (head.leaves["weight"].name, head.leaves["weight"].tied) == ("head/weight", "embedding/weight")
    assert layer(found, "embedding").leaves["weight"].tied is None
    assert (norm.leaves["weight"].trainable, norm.leaves["running_var"].trainable) == (True, False)
    assert not average.leaves["average"].trainable
    assert head.module == "torch.nn.Linear"
    assert layer(found, "rnn/layer_1/backward").leaves["weight_hh"].name == "rnn/weight_hh_l1_reverse"
    said = [layer(found, f"rnn/layer_{depth}/backward").forms[0].attributes for depth in (0, 1)]
    assert [each["dropout"] for each in said] == [0.0, 0.25]
    assert [each["reverse"] for each in said] == [True, True]
    assert layer(found, "encoder/layers/0/linear1").forms[0].attributes["activation"] == "gelu"


def test_two_parameters_on_one_memory_are_tied() -> None:
    model = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
    model[1].weight = nn.Parameter(model[0].weight.data)
    assert layer(inventory(model), "1").leaves["weight"].tied == "0/weight"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # by the compiler's import
def test_paths_are_those_without_wrappers_and_leaves_those_of_the_model() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    for model, before in (
        (nn.DataParallel(inner), "module/"),
        (torch.compile(inner), "_orig_mod/"),
        (nn.Sequential(inner[0], nn.DataParallel(inner[1])), ""),
    ):
        found = inventory(model)
        assert list(kinds(found)) == ["0", "1/0"]
        assert layer(found, "0").leaves["bias"].name == f"{before}0/bias"
    assert list(kinds(inventory(polyamp.Policy("mixed_bfloat16").autocast(inner)))) == ["0", "1/0"]


def test_attributes_have_the_canonical_meaning() -> None:
    norm = attributes(nn.BatchNorm1d(3, momentum=0.01))
    assert norm == {"epsilon": 1e-5, "momentum": 0.99, "unbiased": True}
    assert "momentum" not in attributes(nn.BatchNorm1d(3, momentum=None))  # an average over all batches
    assert attributes(nn.BatchNorm1d(3, track_running_stats=False)) == {"epsilon": 1e-5}
    assert attributes(nn.RMSNorm(3))["epsilon"] == np.finfo(np.float32).eps
    assert attributes(nn.InstanceNorm1d(3))["groups"] == 3
    assert attributes(nn.GELU("tanh")) == {"activation": "gelu_tanh"}
    assert attributes(nn.LeakyReLU(0.2)) == {"activation": "leaky_relu", "negative_slope": 0.2}
    assert attributes(nn.Dropout2d(0.3)) == {"rate": 0.3}
    assert attributes(nn.Conv2d(3, 3, 3, padding=1))["padding"] == "same"
    assert attributes(nn.Conv2d(3, 3, 3, padding=1, stride=2))["padding"] == [[1, 1], [1, 1]]
    assert attributes(nn.Conv2d(3, 3, 1, padding="same"))["padding"] == "valid"
    assert attributes(nn.Sequential(nn.ZeroPad2d((0, 1, 2, 3)), nn.Conv2d(3, 3, 3)))["padding"] == [[2, 3], [0, 1]]
    assert attributes(nn.ConvTranspose1d(3, 3, 4, 2, 1, output_padding=1))["padding"] == [[1, 0]]
    assert attributes(nn.MaxPool2d(3, 2, 1)) == {
        "operation": "max",
        "window": [3, 3],
        "strides": [2, 2],
        "padding": [[1, 1], [1, 1]],
    }
    assert attributes(nn.AvgPool2d(2)) == {
        "operation": "average",
        "window": [2, 2],
        "strides": [2, 2],
        "padding": "valid",
    }
    assert attributes(nn.AdaptiveAvgPool2d(1)) == {"operation": "average", "window": []}
    assert attributes(nn.Upsample(scale_factor=2, mode="bilinear")) == {
        "method": "linear",
        "size": [2, 2],
        "align_corners": False,
    }
    resized = inventory(nn.Sequential(nn.Conv3d(1, 1, 1), nn.Upsample(scale_factor=2)))
    assert layer(resized, "1").forms[0].attributes == {"method": "nearest", "size": [2, 2, 2]}
    assert attributes(nn.Embedding(5, 2, padding_idx=1)) == {"padding_index": 1, "scale": 1.0}
    assert attributes(nn.MultiheadAttention(8, 2, dropout=0.1)) == {"scale": 0.5, "dropout": 0.1, "mask": "drop"}


def test_what_no_other_framework_computes_is_a_kind_of_its_own() -> None:
    assert list(kinds(inventory(nn.Embedding(5, 2, max_norm=1.0))).values()) == [
        "embedding of rows no longer than max_norm"
    ]
    found = kinds(inventory(nn.MultiheadAttention(4, 2, add_zero_attn=True, add_bias_kv=True)))
    assert found == {"": "attention with a key of zeros", "bias_k": "parameter", "bias_v": "parameter"}


def test_a_subclass_that_pads_in_its_own_way_says_no_padding() -> None:
    class Standardized(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    assert "padding" not in attributes(Standardized(3, 3, 3, padding=1))


def test_the_lines_that_would_make_both_sides_equal() -> None:
    model = nn.ModuleDict({"block": nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3), nn.GELU())})
    norm, conv, gelu = inventory(model).layers
    assert norm.lines["epsilon"](0.001) == "model.block[0].eps = 0.001"
    assert norm.lines["momentum"](0.99) == "model.block[0].momentum = 0.01"
    assert conv.lines["padding"]([[1, 1], [2, 2]]) == "model.block[1].padding = (1, 2)"
    assert conv.lines["padding"]([[0, 1], [2, 3]]) == (
        "model.block[1] = torch.nn.Sequential(torch.nn.ZeroPad2d((2, 3, 0, 1)), model.block[1])"
    )
    assert conv.lines["strides"]([2, 2]) == "model.block[1].stride = (2, 2)"
    assert gelu.lines["activation"]("gelu_tanh") == "model.block[2].approximate = 'tanh'"
    for line in (norm.lines["epsilon"](0.25), norm.lines["momentum"](0.5), gelu.lines["activation"]("gelu_tanh")):
        exec(line.replace("model.block", 'model["block"]'), {"model": model})  # the line is what is tested
    again = inventory(model).layers
    assert again[0].forms[0].attributes == {"epsilon": 0.25, "momentum": 0.5, "unbiased": True}
    assert again[2].forms[0].attributes == {"activation": "gelu_tanh"}


class MyRMSNorm(nn.Module):
    """A norm as many models write it."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.variance_epsilon = 1e-6
        if bias:
            self.bias = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


class MyLayerNorm(MyRMSNorm):
    """One that is what it says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, (4,), self.weight)


class T5LayerNorm(MyRMSNorm):
    """One that is an RMSNorm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return MyRMSNorm.forward(self, x)


class GemmaRMSNorm(MyRMSNorm):
    """One whose weight is 0 where others have 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1.0 + self.weight)


def test_norms_of_others_by_their_names() -> None:
    (rms,) = inventory(MyRMSNorm()).layers
    assert [(form.kind, form.attributes) for form in rms.forms] == [("rms_norm", {"epsilon": 1e-6})]
    assert rms.lines["epsilon"](0.1) == "model.variance_epsilon = 0.1"
    assert kinds(inventory(MyLayerNorm())) == {"": "layer_norm"}
    assert kinds(inventory(MyLayerNorm(bias=True))) == {"": "layer_norm"}
    assert kinds(inventory(T5LayerNorm())) == {"": "rms_norm"}
    (gemma,) = inventory(GemmaRMSNorm()).layers
    assert gemma.forms[0].arrays(gemma.arrays)["scale"].read().tolist() == [2.0] * 4
    unknown = type("LayerNorm", (nn.Module,), {"__module__": "builtins"})()
    unknown.weight = nn.Parameter(torch.ones(4))
    assert [form.kind for form in inventory(unknown).layers[0].forms] == ["layer_norm", "rms_norm"]


def test_a_form_that_somebody_registered_comes_first() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 3)
            self.gain = nn.Parameter(torch.ones(3))

    @register(Scaled)
    def scaled(module: Any) -> Form:
        return Form("scaled", (Rule(("inner.weight",), ("kernel",)), Rule(("gain",), ("gain",))))

    found = inventory(nn.Sequential(Scaled()))
    assert kinds(found) == {"0": "scaled", "0/inner": "dense"}
    assert found.layers[0].leaves["inner.weight"].name == "0/inner/weight"


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "no model": (
        lambda: {"weight": torch.zeros(1)},
        ModelError,
        "a model of torch's is an nn.Module. Received: a dict",
    ),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), ModelError, "'0' (torch.nn.LazyLinear) has no arrays yet"),
    "weight norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))),
        PortError,
        "remove_parametrizations(model[0], 'weight')",
    ),
    "old spectral norm": (
        lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(2, 2))),
        PortError,
        "torch.nn.utils.remove_spectral_norm(model[0], 'weight')",
    ),
    "sparse": (
        lambda: nn.ParameterList([nn.Parameter(torch.eye(2).to_sparse())]),
        PortError,
        "'0' cannot be moved: it is a torch.nn.parameter.Parameter of dtype float32 and layout torch.sparse_coo",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_moved_is_refused(name: str) -> None:
    make, kind, message = REFUSED[name]
    with pytest.raises(kind) as error:
        inventory(make())
    assert message in str(error.value)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_old_weight_norm_is_refused() -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 2)))
    with pytest.raises(PortError, match=r"torch\.nn\.utils\.remove_weight_norm\(model\[0\], 'weight'\)"):
        inventory(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_are_refused() -> None:
    with pytest.raises(ModelError, match="a scripted module does not tell its layers"):
        inventory(torch.jit.script(nn.Linear(2, 2)))


def test_a_model_on_meta_is_listed_and_not_read() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 3)
    (found,) = inventory(model).layers
    assert found.arrays["weight"].shape == (3, 2)
    with pytest.raises(PortError, match="'weight' is on the meta device, so it has no values"):
        found.arrays["weight"].read()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.complex64])
def test_every_dtype_is_read_as_it_is_without_a_copy(dtype: torch.dtype) -> None:
    model = nn.ParameterList([nn.Parameter(torch.tensor([[1.5, -2.0]]).to(dtype), requires_grad=False)])
    array = inventory(model).layers[0].arrays["0"]
    assert array.dtype.name == str(dtype).removeprefix("torch.")
    assert array.read().astype(np.complex64).tolist() == [[1.5, -2.0]]
    assert array.read().__array_interface__["data"][0] == model[0].data_ptr()


def test_a_copy_of_a_model_has_the_same_inventory() -> None:
    model = Model()
    assert kinds(inventory(model)) == kinds(inventory(copy.deepcopy(model)))

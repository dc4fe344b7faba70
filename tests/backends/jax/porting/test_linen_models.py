"""linen models: forms by names alone, what a batch shows, stacks of layers, boxes, and what cannot be moved."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import core
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from polyamp import porting
from polyamp.errors import ModelError, PortError
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp_jax.porting.converter import CONVERTER
from tests.porting.layers.cases import inputs
from tests.porting.layers.linen_layers import BUILD, random


def kinds(model: Any, batch: Any = None) -> dict[str, tuple[str, ...]]:
    """Path -> kinds of its forms."""
    return {layer.path: tuple(form.kind for form in layer.forms) for layer in CONVERTER.inventory(model, batch).layers}


def made(module: nn.Module, *given: Any) -> Any:
    """A model with random values."""
    return module, random(jax.eval_shape(module.init, jax.random.key(0), *given), type(module).__name__)


class Everything(nn.Module):
    """Layers under linen's own names."""

    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        x = nn.Conv(4, (3, 3))(x)
        x = nn.BatchNorm(not train)(x)
        x = nn.Dropout(0.5)(x, not train)
        x = nn.ConvTranspose(4, (2, 2))(x)
        x = nn.GroupNorm(2)(x).reshape(x.shape[0], -1, 4)
        x = nn.RNN(nn.GRUCell(4), reverse=True, keep_order=True)(x)
        x = x + self.param("position", nn.initializers.normal(), (1, 1, 4))
        x = nn.MultiHeadDotProductAttention(2, normalize_qk=True)(x)
        x = nn.DenseGeneral((2, 3))(x)
        return nn.LayerNorm()(nn.PReLU()(nn.DenseGeneral(5, axis=(-2, -1), use_bias=False)(x)))


IMAGE = np.random.default_rng(0).standard_normal((2, 4, 4, 3)).astype(np.float32)


def test_names_and_shapes_tell_what_a_layer_may_be_the_likeliest_first() -> None:
    found = kinds(made(Everything(), IMAGE))
    assert {path: forms[0] for path, forms in found.items()} == {
        "Conv_0": "conv",
        "BatchNorm_0": "batch_norm",
        "ConvTranspose_0": "conv_transpose",
        "GroupNorm_0": "group_norm",
        "GRUCell_0": "gru",
        "position": "parameter",
        "MultiHeadDotProductAttention_0": "attention",
        "MultiHeadDotProductAttention_0/query_ln": "rms_norm",
        "MultiHeadDotProductAttention_0/key_ln": "rms_norm",
        "DenseGeneral_0": "dense",
        "DenseGeneral_1": "dense",
        "PReLU_0": "prelu",
        "LayerNorm_0": "layer_norm",
    }
    assert found["Conv_0"] == ("conv", "conv_transpose", "dense")
    assert found["LayerNorm_0"] == ("layer_norm", "group_norm")


def test_a_batch_shows_classes_settings_and_the_order() -> None:
    inventory = CONVERTER.inventory(made(Everything(), IMAGE), IMAGE)
    assert inventory.ordered
    layers = {layer.path: layer for layer in inventory.layers}
    assert all(len(layer.forms) == 1 for layer in layers.values())
    assert list(layers) == [
        "Conv_0",
        "BatchNorm_0",
        "ConvTranspose_0",
        "GroupNorm_0",
        "GRUCell_0",
        "position",
        "MultiHeadDotProductAttention_0",
        "MultiHeadDotProductAttention_0/query_ln",
        "MultiHeadDotProductAttention_0/key_ln",
        "DenseGeneral_0",
        "DenseGeneral_1",
        "PReLU_0",
        "LayerNorm_0",
        "Dropout_0",
    ]
    said = {path: dict(layer.forms[0].attributes) for path, layer in layers.items()}
    assert said["BatchNorm_0"] == {"epsilon": 1e-5, "momentum": 0.99, "unbiased": False}
    assert said["GRUCell_0"]["reverse"] is True
    assert said["MultiHeadDotProductAttention_0/query_ln"] == {"epsilon": 1e-6, "axes": 1}
    assert said["DenseGeneral_0"] == {"outputs": [2, 3]}
    assert said["DenseGeneral_1"] == {"inputs": [2, 3]}
    assert said["Dropout_0"] == {"rate": 0.5}
    assert layers["LayerNorm_0"].module == "flax.linen.LayerNorm"
    assert layers["LayerNorm_0"].lines["epsilon"](0.001) == "nn.LayerNorm(epsilon=0.001) for 'LayerNorm_0'"


class Set(nn.Module):
    inner: nn.Module

    def setup(self) -> None:
        self.norm = nn.LayerNorm(epsilon=0.5)
        self.blocks = [nn.Dense(4), nn.Bidirectional(nn.RNN(nn.LSTMCell(2)), nn.RNN(nn.LSTMCell(2)))]

    def __call__(self, x: Any) -> Any:
        for block in (self.norm, *self.blocks, self.inner):
            x = block(x)
        return x


def test_fields_and_what_setup_defines_are_seen_without_a_batch() -> None:
    model = made(Set(nn.Conv(3, (2,), padding="CAUSAL", feature_group_count=1)), np.zeros((2, 5, 4), np.float32))
    layers = {layer.path: layer.forms for layer in CONVERTER.inventory(model).layers}
    assert layers["norm"][0].attributes == {"epsilon": 0.5, "axes": 1}
    assert [form.kind for form in layers["inner"]] == ["conv"]
    assert layers["inner"][0].attributes["padding"] == "causal"
    assert [layers[f"blocks_1/{way}_rnn/cell"][0].attributes["reverse"] for way in ("forward", "backward")] == [
        False,
        True,
    ]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: None) -> Any:
        return x + nn.Dense(4)(nn.LayerNorm()(x)), None


class Stacked(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        blocks = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return nn.Dense(2)(blocks(name="blocks")(x, None)[0])


def test_layers_stacked_by_scan_are_listed_one_by_one_with_a_batch_and_refused_without() -> None:
    x = inputs("dense_square")[:, :4]
    model = made(Stacked(), x)
    with pytest.raises(PortError, match=r"'blocks/Dense_0' cannot be moved: .* a batch tells"):
        CONVERTER.inventory(model)
    inventory = CONVERTER.inventory(model, x)
    expected = [f"blocks/{number}/{name}_0" for number in range(3) for name in ("LayerNorm", "Dense")]
    assert [layer.path for layer in inventory.layers] == [*expected, "Dense_0"]
    leaves = {leaf.name: leaf for layer in inventory.layers for leaf in layer.leaves.values()}
    kernel = model[1]["params"]["blocks"]["Dense_0"]["kernel"]
    np.testing.assert_array_equal(leaves["blocks/Dense_0/kernel[2]"].array.read(), kernel[2])
    _, filled = CONVERTER.fill(model, {"blocks/Dense_0/kernel[1]": Lazy.of(np.zeros((4, 4), np.float32))})
    got = filled["params"]["blocks"]["Dense_0"]["kernel"]
    np.testing.assert_array_equal(got, np.stack([kernel[0], np.zeros((4, 4)), kernel[2]]))
    evaluation = CONVERTER.evaluate(model, x, lambda outputs: [np.ones_like(output) for output in outputs])
    assert evaluation.gradients.keys() == leaves.keys()
    assert evaluation.gradients["blocks/Dense_0/kernel[2]"].shape == (4, 4)


def test_evaluate_is_in_float32_and_as_in_inference_and_leaves_the_model_alone() -> None:
    module, variables = made(Everything(), IMAGE)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), variables)
    copies = jax.tree.map(jnp.copy, half)
    chosen: list[Any] = []

    def cotangents(outputs: Any) -> Any:
        chosen.extend(outputs)
        return [np.ones_like(output) for output in outputs]

    found = CONVERTER.evaluate((module, half), {"x": IMAGE}, cotangents)
    single = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half)
    rest = {"batch_stats": single["batch_stats"]}

    @functools.partial(jax.grad, has_aux=True)
    def gradient_of(params: Any) -> Any:
        outputs = module.apply({"params": params, **rest}, IMAGE, train=False)
        return outputs.sum(), outputs

    gradients, expected = jax.jit(gradient_of)(single["params"])
    np.testing.assert_allclose(found.outputs[0], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(chosen[0], found.outputs[0])
    assert [array.dtype for array in found.outputs] == [np.float32]
    assert set(found.gradients) == set(_names(gradients))
    for name, gradient in _names(gradients).items():
        np.testing.assert_allclose(found.gradients[name], gradient, rtol=1e-4, atol=1e-4)
    assert list(found.modules)[:3] == ["Conv_0", "BatchNorm_0", "Dropout_0"]
    assert found.modules["GRUCell_0"].shape == (2, 16, 4)
    np.testing.assert_array_equal(found.modules["BatchNorm_0"], found.modules["Dropout_0"])
    for before, after in zip(jax.tree.leaves(copies), jax.tree.leaves(half), strict=True):
        np.testing.assert_array_equal(before, after)


def _names(tree: Any) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(keys, simple=True, separator="/"): leaf
        for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


class Half(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(3, dtype=jnp.bfloat16)(x)


def test_a_layer_that_computes_in_bfloat16_is_evaluated_in_float32() -> None:
    x = inputs("dense")
    module, variables = made(Half(), x)
    found = CONVERTER.evaluate((module, variables), x, lambda outputs: [np.ones_like(output) for output in outputs])
    dense = variables["params"]["Dense_0"]
    np.testing.assert_allclose(found.outputs[0], x @ dense["kernel"] + dense["bias"], rtol=1e-6, atol=1e-6)


def test_boxes_frozen_dicts_shardings_numpy_arrays_and_shapes_stay_what_they_are() -> None:
    names = nn.with_partitioning(nn.initializers.normal(), ("model", None))
    module = nn.Dense(4, kernel_init=names)
    shapes = jax.eval_shape(module.init, jax.random.key(0), np.zeros((1, 3), np.float32))
    leaves = {
        leaf.name: leaf for layer in CONVERTER.inventory((module, shapes)).layers for leaf in layer.leaves.values()
    }
    assert set(leaves) == set(_names(shapes["params"]))
    with pytest.raises(PortError, match="is a shape without values"):
        leaves["bias"].array.read()
    values = {name: Lazy.of(np.full(leaf.array.shape, 2, np.float32)) for name, leaf in leaves.items()}
    _, filled = CONVERTER.fill((module, shapes), values)
    assert isinstance(filled["params"]["kernel"], nn.Partitioned)
    assert filled["params"]["kernel"].names == ("model", None)
    np.testing.assert_array_equal(module.apply(filled, np.ones((1, 3), np.float32)), np.full((1, 4), 8.0))

    placed = NamedSharding(Mesh(np.array(jax.devices()[:1]), "x"), PartitionSpec("x"))
    variables = {
        "params": {"kernel": jax.device_put(jnp.ones((3, 4), jnp.bfloat16), placed), "bias": np.ones(4, "float32")}
    }
    frozen = core.freeze(variables)
    (layer,) = CONVERTER.inventory((nn.Dense(4), frozen)).layers
    _, filled = CONVERTER.fill(
        (nn.Dense(4), frozen), {leaf.name: Lazy.of(np.array(leaf.array) * 3) for leaf in layer.leaves.values()}
    )
    assert isinstance(filled, core.FrozenDict)
    assert filled["params"]["kernel"].sharding == placed
    assert filled["params"]["kernel"].dtype == jnp.bfloat16
    assert type(filled["params"]["bias"]) is np.ndarray
    np.testing.assert_array_equal(filled["params"]["bias"], np.full(4, 3.0))
    np.testing.assert_array_equal(variables["params"]["bias"], np.ones(4))


def test_fill_copies_and_refuses_what_does_not_fit() -> None:
    model = BUILD["dense"]()
    source = np.ones((5, 7), np.float32)
    _, filled = CONVERTER.fill(model, {"kernel": Lazy.of(source)})
    source[:] = 5
    np.testing.assert_array_equal(filled["params"]["kernel"], np.ones((5, 7)))
    with pytest.raises(PortError, match="no array 'weight'"):
        CONVERTER.fill(model, {"weight": Lazy.of(source)})
    with pytest.raises(PortError, match=r"float32\[5, 7\] in the model. Received: float32\[7, 5\]"):
        CONVERTER.fill(model, {"kernel": Lazy.of(source.T)})
    with pytest.raises(ModelError, match="linen_module, variables"):
        CONVERTER.inventory((nn.Dense(3),))


@pytest.mark.parametrize(
    ("module", "shape", "said"),
    [
        (nn.ConvLocal(2, (2,)), (1, 4, 3), "ConvLocal: its kernel differs"),
        (nn.Conv(2, (2,), padding=0, input_dilation=2), (1, 4, 3), "Conv: input_dilation="),
        (nn.Conv(2, (2,), mask=jnp.ones((2, 3, 2))), (1, 4, 3), "mask="),
        (nn.RNN(nn.MGUCell(2)), (1, 4, 3), "minimal gated unit"),
        (nn.RNN(nn.ConvLSTMCell(2, (2,))), (1, 3, 4, 3), "convolutional LSTM"),
        (nn.RNN(nn.SimpleCell(3, residual=True)), (1, 4, 3), "residual=True"),
        (nn.WeightNorm(nn.Dense(2)), (1, 3), "WeightNorm: it computes the kernel"),
        (nn.DenseGeneral(2, batch_dims=(0,)), (1, 3), "batch axes"),
        (nn.LayerNorm(reduction_axes=(1, 2), feature_axes=-1), (1, 2, 3), "not the last ones"),
        (nn.GroupNorm(1, reduction_axes=(-1,)), (1, 2, 3), "are its own"),
        (nn.BatchNorm(True, axis=1), (1, 2, 3), "axis=1"),
    ],
)
def test_what_has_no_canonical_layout_is_refused_by_name(module: nn.Module, shape: tuple[int, ...], said: str) -> None:
    x = np.zeros(shape, np.float32)
    with pytest.raises(PortError, match=said):
        CONVERTER.inventory(made(module, x), x)


class Own(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x * self.param("gain", nn.initializers.ones, (x.shape[-1],))


def test_a_third_party_gives_its_own_module_a_form() -> None:
    @porting.register(Own)
    def own(layer: Any) -> porting.Form:
        return porting.Form("rms_norm", (porting.Rule(("gain",), ("scale",)),))

    x = np.zeros((1, 3), np.float32)
    assert kinds(made(Own(), x)) == {"": ("rms_norm",)}

"""What the weights do not carry, in canonical meaning, and the lines of code that set it."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from polyamp.porting.layouts.canonical_model import Layer
from polyamp.porting.layouts.layer_kinds import KINDS
from polyamp.porting.layouts.layer_layout import Form
from polyamp_keras.porting.converter import CONVERTER
from polyamp_keras.porting.layers.activations import activation_attributes, activation_name
from polyamp_keras.porting.layers.layer_record import UNKNOWN
from polyamp_keras.porting.suggested_code import attribute_lines
from tests.porting.layers import formulas
from tests.porting.layers.cases import CASES
from tests.porting.layers.keras_layers import BUILD, randomized
from tests.porting.layers.keras_layers import run as output


def functional(*stack: Any, shape: tuple[int, ...] = (8, 7, 4)) -> Any:
    given = outputs = keras.Input(shape)
    for layer in stack:
        outputs = layer(outputs)
    return keras.Model(given, outputs)


def forms(*stack: Any, shape: tuple[int, ...] = (8, 7, 4)) -> dict[str, Any]:
    """path -> (kind, attributes)"""
    found = CONVERTER.inventory(functional(*stack, shape=shape)).layers
    return {layer.path: (layer.forms[0].kind, layer.forms[0].attributes) for layer in found}


CONVOLUTION = {"activation": "linear", "padding": "valid", "padding_mode": "zeros", "groups": 1, "channels": "last"}
GIVEN: list[tuple[Any, str, dict[str, Any]]] = [
    (layers.Conv2D(4, 3, strides=2, padding="same", activation="gelu"), "conv", {"strides": [2, 2], "padding": "same"}),
    (layers.Conv2D(4, 3, dilation_rate=2), "conv", CONVOLUTION | {"dilation": [2, 2], "strides": [1, 1]}),
    (layers.DepthwiseConv2D(3, depth_multiplier=2), "conv", {"groups": 4}),
    (layers.Conv2DTranspose(2, 3, strides=2, padding="same"), "conv_transpose", {"padding": [[0, 1], [0, 1]]}),
    (layers.BatchNormalization(momentum=0.9), "batch_norm", {"momentum": 0.9, "epsilon": 1e-3, "unbiased": False}),
    (layers.LayerNormalization(axis=(2, 3)), "layer_norm", {"axes": 2, "epsilon": 1e-3}),
    (layers.LayerNormalization(axis=(1, 3)), "keras.LayerNormalization (over axes [1, 3])", {"epsilon": 1e-3}),
    (layers.RMSNormalization(), "rms_norm", {"epsilon": 1e-6}),
    (layers.GroupNormalization(2), "group_norm", {"groups": 2, "epsilon": 1e-3}),
    (layers.GroupNormalization(-1), "group_norm", {"groups": 4}),
    (layers.ReLU(), "activation", {"activation": "relu"}),
    (layers.ReLU(max_value=6), "activation", {"activation": "relu6"}),
    (layers.ReLU(negative_slope=0.1), "activation", {"activation": "leaky_relu", "negative_slope": 0.1}),
    (layers.ReLU(max_value=2), "activation", {"activation": "relu(max_value=2, negative_slope=0, threshold=0)"}),
    (layers.LeakyReLU(), "activation", {"activation": "leaky_relu", "negative_slope": 0.3}),
    (layers.ELU(0.7), "activation", {"activation": "elu", "alpha": 0.7}),
    (layers.Softmax(axis=-2), "activation", {"activation": "softmax", "axis": -2}),
    (layers.Activation("swish"), "activation", {"activation": "silu"}),
    (layers.Dropout(0.3), "dropout", {"rate": 0.3}),
    (layers.MaxPooling2D(3, 2), "pooling", {"operation": "max", "window": [3, 3], "strides": [2, 2]}),
    (layers.AveragePooling2D(2, padding="same"), "pooling", {"padding": "same", "counts_padding": False}),
    (layers.GlobalAveragePooling2D(), "pooling", {"operation": "average", "window": []}),
    (layers.AdaptiveAveragePooling2D((4, 3)), "pooling", {"operation": "average", "size": [4, 3]}),
    (layers.AdaptiveMaxPooling2D((4, 3)), "pooling", {"operation": "max", "size": [4, 3]}),
    (layers.Flatten(), "flatten", {"channels": "last"}),
    (layers.Reshape((-1,)), "flatten", {"channels": "last"}),
    (
        layers.UpSampling2D(2, interpolation="bilinear"),
        "resize",
        {"method": "linear", "size": [2, 2], "align_corners": False},
    ),
    (layers.PReLU(), "keras.PReLU (slopes of shape [8, 7, 4])", {}),
    (layers.EinsumDense("abcd,bde->abce", (8, 7, 2)), "keras.EinsumDense (abcd,bde->abce)", {}),
]


@pytest.mark.parametrize(("layer", "kind", "expected"), GIVEN, ids=[type(layer).__name__ for layer, _, _ in GIVEN])
def test_attributes(layer: Any, kind: str, expected: dict[str, Any]) -> None:
    ((found, attributes),) = forms(layer).values()
    assert found == kind
    assert {name: attributes[name] for name in expected} == expected


def test_names_of_activations() -> None:
    approximate = functools.partial(keras.activations.gelu, approximate=True)
    assert (
        activation_name(approximate)
        == activation_name(lambda x: keras.activations.gelu(x, approximate=True))
        == "gelu_tanh"
    )
    assert activation_name(lambda x: x * ops.sigmoid(x)) == "silu"
    assert activation_name(layers.LeakyReLU()) == "leaky_relu"
    assert activation_attributes(layers.LeakyReLU(0.1)) == {"activation": "leaky_relu", "negative_slope": 0.1}
    assert activation_attributes(lambda x: ops.leaky_relu(x, 0.05)) == {
        "activation": "leaky_relu",
        "negative_slope": 0.05,
    }
    assert activation_attributes(keras.activations.elu) == {"activation": "elu", "alpha": 1.0}
    assert activation_attributes(keras.activations.softsign) == {"activation": "soft_sign"}
    assert activation_name(lambda x: ops.sin(x)) is UNKNOWN
    assert activation_name(lambda x, y: x) is UNKNOWN


def test_zeros_before_a_layer_are_its_padding() -> None:
    found = forms(layers.ZeroPadding2D(((0, 1), (2, 3))), layers.Conv2D(3, 3))
    assert found["conv2d"][1]["padding"] == [[0, 1], [2, 3]]
    found = forms(layers.ZeroPadding2D(0), layers.Conv2D(3, 3))
    assert found["conv2d"][1]["padding"] == "valid"
    found = forms(layers.ZeroPadding1D(2), layers.Conv1D(3, 3), shape=(8, 4))
    assert found["conv1d"][1]["padding"] == [[2, 2]]
    after_relu = forms(layers.ReLU(), layers.ZeroPadding2D(1), layers.MaxPooling2D(3, 2))
    assert after_relu["max_pooling2d"][1]["padding"] == [[1, 1], [1, 1]]
    after_any = forms(layers.ZeroPadding2D(1), layers.MaxPooling2D(3, 2))
    assert after_any["max_pooling2d"][1]["padding"] == "valid"  # zeros are not what a maximum takes for no padding
    shared, given = layers.Conv2D(4, 3), keras.Input((8, 7, 4))
    model = keras.Model(given, shared(layers.ZeroPadding2D(1)(shared(given))))
    assert CONVERTER.inventory(model).layers[0].forms[0].attributes["padding"] == "valid"


def test_channels_first() -> None:
    keras.config.set_image_data_format("channels_last")
    convolution = layers.Conv2D(3, 3, data_format="channels_first")
    found = forms(convolution, layers.BatchNormalization(axis=1), layers.Flatten(), shape=(4, 8, 7))
    assert found["conv2d"][1]["channels"] == "first"
    assert found["flatten"][1]["channels"] == "first"
    told = layers.Flatten(data_format="channels_first")  # puts them last itself
    assert forms(layers.Conv2D(3, 3, data_format="channels_first"), told, shape=(4, 8, 7))["flatten"][1] == {
        "channels": "last"
    }


TRANSPOSED = [
    {"kernel_size": 4, "strides": 2, "padding": "same"},
    {"kernel_size": 5, "strides": 3, "padding": "same"},
    {"kernel_size": 2, "strides": 3, "padding": "same"},
    {"kernel_size": 2, "strides": 3},
    {"kernel_size": 3, "strides": 2, "padding": "same", "output_padding": 1},
    {"kernel_size": 3, "strides": 2, "output_padding": 1},
]


@pytest.mark.parametrize("options", TRANSPOSED, ids=str)
def test_what_a_transposed_convolution_cuts_off(options: dict[str, Any]) -> None:
    model = randomized(functional(layers.Conv1DTranspose(2, **options), shape=(5, 3)), "transposed")
    (layer,) = CONVERTER.inventory(model).layers
    x = np.random.default_rng(0).standard_normal((2, 5, 3)).astype(np.float32)
    form = layer.forms[0]
    expected = formulas.one(Layer(form.kind, form.arrays(layer.arrays), form.attributes), x)
    np.testing.assert_allclose(output(model, x), expected, atol=1e-5)


def test_lines_reach_the_layer_and_set_the_attribute() -> None:
    class Model(keras.Model):  # type: ignore[misc]  # Keras is untyped
        def __init__(self) -> None:
            super().__init__()
            self.blocks = [functional(layers.BatchNormalization(name="norm"), shape=(4,))]
            self.parts = {"head": layers.Dense(4, activation="gelu"), "drop": layers.Dropout(0.1)}
            self.conv = layers.Conv1D(2, 3)

        def call(self, x: Any) -> Any:
            return self.conv(self.parts["drop"](self.parts["head"](self.blocks[0](x)))[:, :, None])

    model = Model()
    model(np.zeros((1, 4)))
    lines = {layer.path.rpartition("/")[2]: layer.lines for layer in CONVERTER.inventory(model).layers}
    expected = {
        "norm": {"epsilon": (1e-5, "model.blocks[0].get_layer('norm').epsilon = 1e-05")},
        "dense": {
            "activation": (
                "gelu_tanh",
                "model.parts['head'].activation = lambda x: keras.activations.gelu(x, approximate=True)",
            )
        },
        "dropout": {"rate": (0.2, "model.parts['drop'].rate = 0.2")},
        "conv1d": {
            "padding": ([[1, 1]], "keras.layers.ZeroPadding1D((1, 1)) before model.conv, whose padding is 'valid'"),
            "strides": ([2], "model.conv.strides = (2,)"),
        },
    }
    for path, attributes in expected.items():
        for attribute, (value, line) in attributes.items():
            assert lines[path][attribute](value) == line
            if "before" not in line:
                exec(line, {"model": model, "keras": keras})  # the line is code
    again = {layer.path.rpartition("/")[2]: layer for layer in CONVERTER.inventory(model).layers}
    assert again["norm"].forms[0].attributes["epsilon"] == 1e-5
    assert again["dense"].forms[0].attributes["activation"] == "gelu_tanh"
    assert again["dropout"].forms[0].attributes["rate"] == 0.2


def test_every_case_says_what_its_kind_has() -> None:
    for name in CASES:
        for layer in CONVERTER.inventory(BUILD[name]()).layers:
            kind = KINDS[layer.forms[0].kind]
            assert set(layer.forms[0].attributes) <= set(kind.attributes), name
            structural = {attribute for attribute, row in kind.attributes.items() if row.structural}
            assert structural <= set(layer.forms[0].attributes), name
            assert set(layer.forms[0].shapes(layer.arrays)) <= set(kind.arrays), name


def test_a_layer_that_no_line_reaches_is_named_behind_the_line() -> None:
    norm = layers.LayerNormalization()
    lines = attribute_lines(norm, Form("layer_norm", (), {"epsilon": 1e-3}), "model  # at block/norm")
    assert lines["epsilon"](1e-5) == "layer.epsilon = 1e-05  # at block/norm"

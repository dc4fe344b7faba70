"""The cases of `cases.py` as Keras layers. Called by the tests of porting in Keras and by the pairs of frameworks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.porting.layers.cases import CASES

Array = np.ndarray[Any, Any]
_EPSILON = 1e-5


def run(model: Any, inputs: Array) -> Array:
    """What a model makes of its inputs, as in inference."""
    return np.asarray(ops.convert_to_numpy(model(inputs, training=False)))


def _case(name: str, *stack: Callable[[], Any]) -> Callable[[], Any]:
    """A sequential functional model of layers."""

    def build() -> Any:
        case = CASES[name]
        given = outputs = keras.Input(case.inputs[1:], dtype="int32" if case.tokens else "float32")
        for make in stack:
            outputs = make()(outputs)
        return randomized(keras.Model(given, outputs), name)

    return build


def _whole(name: str, make: Callable[[], Any]) -> Callable[[], Any]:
    """A model that is one layer of the user's own."""

    def build() -> Any:
        case = CASES[name]
        model = make()
        model(np.zeros(case.inputs, np.int32 if case.tokens else np.float32))
        return randomized(model, name)

    return build


def randomized(model: Any, name: str) -> Any:
    """The model with random weights; variances above zero."""
    rng = np.random.default_rng(len(name))
    for weight in model.weights:
        values = rng.normal(0, 0.5, weight.shape)
        weight.assign(1 + 0.2 * np.abs(values) if "variance" in weight.name else values)
    return model


class Mlp(keras.Model):  # type: ignore[misc]  # Keras is untyped
    """A subclassed model: its layers lie in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(8)
        self.head = layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.head(keras.activations.gelu(self.hidden(x), approximate=False))


class TiedHead(keras.Model):  # type: ignore[misc]  # Keras is untyped
    def __init__(self) -> None:
        super().__init__()
        self.tokens = layers.Embedding(11, 6)

    def call(self, x: Any) -> Any:
        return ops.matmul(self.tokens(x), ops.transpose(self.tokens.embeddings))


class Position(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    def build(self, shape: Any) -> None:
        self.position = self.add_weight(shape=(1, *shape[1:]), name="position")

    def call(self, x: Any) -> Any:
        return x + self.position


class Scalar(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    def build(self, shape: Any) -> None:
        self.temperature = self.add_weight(shape=(), name="temperature")

    def call(self, x: Any) -> Any:
        return x * self.temperature


class ClassToken(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    def build(self, shape: Any) -> None:
        self.token = self.add_weight(shape=(1, 1, shape[-1]), name="class_token")

    def call(self, x: Any) -> Any:
        row = ops.broadcast_to(self.token, (ops.shape(x)[0], 1, x.shape[-1]))
        return ops.concatenate([row, x], 1)


class ByHand(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Attention of dense layers."""

    def __init__(self, *, packed: bool, heads: int = 2, features: int = 6) -> None:
        super().__init__()
        self.heads = heads
        names = ("qkv",) if packed else ("query", "key", "value")
        self.projections = {name: layers.Dense(features * (3 if packed else 1), name=name) for name in names}
        self.out = layers.Dense(features, name="out")

    def call(self, x: Any) -> Any:
        parts = [projection(x) for projection in self.projections.values()]
        query, key, value = ops.split(parts[0], 3, -1) if len(parts) == 1 else parts
        shape = (-1, x.shape[1], self.heads, x.shape[2] // self.heads)
        mixed = ops.dot_product_attention(*(ops.reshape(part, shape) for part in (query, key, value)))
        return self.out(ops.reshape(mixed, (-1, *x.shape[1:])))


class Self(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Attention of a sequence to itself."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attention = attention

    def call(self, x: Any) -> Any:
        return self.attention(x, x)


def _lstm(**options: Any) -> Any:
    return layers.LSTM(5, return_sequences=True, **options)


BUILD: Mapping[str, Callable[[], Any]] = {
    "dense": _case("dense", lambda: layers.Dense(7)),
    "dense_no_bias": _case("dense_no_bias", lambda: layers.Dense(7, use_bias=False)),
    "dense_square": _case("dense_square", lambda: layers.Dense(6)),
    "einsum_dense": _case(
        "einsum_dense",
        lambda: layers.EinsumDense("abc,cde->abde", (None, 2, 4), bias_axes="de"),
        lambda: layers.Reshape((3, 8)),
    ),
    "einsum_dense_joins": _case("einsum_dense_joins", lambda: layers.EinsumDense("...de,def->...f", 6, bias_axes="f")),
    "mlp": _whole("mlp", Mlp),
    "conv1d": _case("conv1d", lambda: layers.Conv1D(4, 3, padding="same")),
    "conv1d_dilated": _case("conv1d_dilated", lambda: layers.Conv1D(4, 3, dilation_rate=2)),
    "conv2d": _case("conv2d", lambda: layers.Conv2D(4, (3, 2), use_bias=False)),
    "conv2d_square": _case("conv2d_square", lambda: layers.Conv2D(3, 3, padding="same")),
    "conv2d_explicit": _case(
        "conv2d_explicit", lambda: layers.ZeroPadding2D(1), lambda: layers.Conv2D(4, 3, strides=2)
    ),
    "conv2d_same_strided": _case("conv2d_same_strided", lambda: layers.Conv2D(4, 3, strides=2, padding="same")),
    "conv2d_grouped": _case("conv2d_grouped", lambda: layers.Conv2D(6, 3, groups=2)),
    "conv2d_depthwise": _case("conv2d_depthwise", lambda: layers.DepthwiseConv2D(3, depth_multiplier=2)),
    "conv2d_separable": _case("conv2d_separable", lambda: layers.SeparableConv2D(5, 3)),
    "conv3d": _case("conv3d", lambda: layers.Conv3D(3, (2, 3, 2))),
    "conv_transpose1d": _case("conv_transpose1d", lambda: layers.Conv1DTranspose(4, 3, strides=2)),
    "conv_transpose2d": _case("conv_transpose2d", lambda: layers.Conv2DTranspose(4, 3, strides=2)),
    "conv_transpose2d_square": _case("conv_transpose2d_square", lambda: layers.Conv2DTranspose(3, 3)),
    "conv_transpose3d": _case("conv_transpose3d", lambda: layers.Conv3DTranspose(3, 2, strides=2)),
    "embedding": _case("embedding", lambda: layers.Embedding(11, 6)),
    "position": _whole("position", Position),
    "tied_head": _whole("tied_head", TiedHead),
    "layer_norm": _case("layer_norm", lambda: layers.LayerNormalization(epsilon=_EPSILON)),
    "layer_norm_no_bias": _case(
        "layer_norm_no_bias", lambda: layers.LayerNormalization(epsilon=_EPSILON, center=False)
    ),
    "rms_norm": _case("rms_norm", lambda: layers.RMSNormalization(epsilon=_EPSILON)),
    "group_norm": _case("group_norm", lambda: layers.GroupNormalization(2, epsilon=_EPSILON)),
    "instance_norm": _case("instance_norm", lambda: layers.GroupNormalization(-1, epsilon=_EPSILON)),
    "batch_norm": _case("batch_norm", lambda: layers.BatchNormalization(epsilon=_EPSILON, momentum=0.9)),
    "lstm": _case("lstm", _lstm),
    "lstm_stacked": _case("lstm_stacked", _lstm, _lstm),
    "lstm_bidirectional": _case("lstm_bidirectional", lambda: layers.Bidirectional(_lstm())),
    "gru": _case("gru", lambda: layers.GRU(5, return_sequences=True)),
    "gru_before": _case("gru_before", lambda: layers.GRU(5, return_sequences=True, reset_after=False)),
    "simple_rnn": _case("simple_rnn", lambda: layers.SimpleRNN(5, return_sequences=True)),
    "attention": _whole("attention", lambda: Self(layers.MultiHeadAttention(2, 3))),
    "attention_no_bias": _whole("attention_no_bias", lambda: Self(layers.MultiHeadAttention(2, 3, use_bias=False))),
    "attention_packed": _whole("attention_packed", lambda: ByHand(packed=True)),
    "attention_separate": _whole("attention_separate", lambda: ByHand(packed=False)),
    "attention_grouped": _whole("attention_grouped", lambda: Self(layers.GroupQueryAttention(2, 4, 2, use_bias=False))),
    "prelu": _case("prelu", lambda: layers.PReLU(shared_axes=[1])),
    "scalar": _whole("scalar", Scalar),
    "class_token": _whole("class_token", ClassToken),
    "flatten": _case(
        "flatten", lambda: layers.Conv2D(4, 3, activation="relu"), layers.Flatten, lambda: layers.Dense(7)
    ),
}
"""Case -> a built model with random weights."""

MISSING: Mapping[str, str] = {}
"""Case -> why Keras has no layer for it."""

"""Models of transformers, timm and torchvision to Keras: `keras.applications`, and KerasHub's way of writing.

The sources of transformers are its own; `keras.applications` are Keras's own. DenseNet: Huang et al., 2016, as
torchvision has it. ResNetV2: He et al., 2016, as timm has it, with batch norms. VGG: Simonyan and Zisserman, 2014.
KerasHub's BERT encoder is written anew, small. NCF: He et al., 2017, the two ways of its public implementations.
"""

from __future__ import annotations

from typing import Any, Final

import keras
import numpy as np
import torch
import transformers
from keras import layers, ops
from torch import nn
from torch.nn import functional as F

from tests.porting.public.zoo.case import VOCABULARY, Batch, Case, channels_first, images, tokens, unchanged

SAME: Final[dict[str, Any]] = {
    "weights": None, "classes": 10, "input_shape": (32, 32, 3), "classifier_activation": None
}  # fmt: skip


def mobilenet_v2() -> Any:
    return transformers.MobileNetV2ForImageClassification(
        transformers.MobileNetV2Config(depth_multiplier=0.35, tf_padding=True, num_labels=10)
    )


def mobilenet_v1() -> Any:
    return transformers.MobileNetV1ForImageClassification(
        transformers.MobileNetV1Config(depth_multiplier=0.25, tf_padding=True, num_labels=10)
    )


def convnext() -> Any:
    return transformers.ConvNextForImageClassification(transformers.ConvNextConfig(num_labels=10))


def keras_convnext(batch: Batch) -> Any:
    model = keras.applications.ConvNeXtTiny(include_preprocessing=False, **SAME)
    model.get_layer("convnext_tiny_head_layernorm").epsilon = 1e-12
    return model


def efficientnet() -> Any:
    return transformers.EfficientNetForImageClassification(
        transformers.EfficientNetConfig(
            image_size=32, width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280, num_labels=10
        )
    )


def keras_efficientnet(batch: Batch) -> Any:
    """Without the layers that scale the pixels, for transformers does that in its image processor."""
    whole = keras.applications.EfficientNetB0(**SAME)
    return keras.Model(whole.get_layer("stem_conv_pad").input, whole.output)


# DenseNet.
class DenseLayer(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs, eps=1.001e-5), nn.Conv2d(inputs, 128, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(128, eps=1.001e-5), nn.Conv2d(128, 32, 3, padding=1, bias=False)

    def forward(self, x: Any) -> Any:
        y = self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))
        return torch.cat([x, y], 1)


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv0, self.norm0 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64, eps=1.001e-5)
        blocks: dict[str, nn.Module] = {}
        width = 64
        for number, size in enumerate((6, 12, 24, 16), 1):
            each = nn.Sequential()
            for position in range(1, size + 1):
                each.add_module(f"denselayer{position}", DenseLayer(width))
                width += 32
            blocks[f"denseblock{number}"] = each
            if number < 4:
                blocks[f"transition{number}"] = nn.ModuleDict(
                    {"norm": nn.BatchNorm2d(width, eps=1.001e-5), "conv": nn.Conv2d(width, width // 2, 1, bias=False)}
                )
                width //= 2
        self.features = nn.ModuleDict(blocks)
        self.norm5, self.classifier = nn.BatchNorm2d(width, eps=1.001e-5), nn.Linear(width, 10)

    def forward(self, x: Any) -> Any:
        x = F.max_pool2d(F.relu(self.norm0(self.conv0(x))), 3, 2, 1)
        for block in self.features.values():
            if isinstance(block, nn.ModuleDict):
                x = F.avg_pool2d(block["conv"](F.relu(block["norm"](x))), 2)
            else:
                x = block(x)
        return self.classifier(F.relu(self.norm5(x)).mean((2, 3)))


# ResNetV2 with batch norms; Keras's has biases that timm's lacks. The stem is timm's "fixed", which pads with zeros.
class PreActBlock(nn.Module):
    def __init__(self, inputs: int, middle: int, stride: int, project: bool) -> None:
        super().__init__()
        self.stride = stride
        self.norm1 = nn.BatchNorm2d(inputs, eps=1.001e-5)
        self.downsample = nn.Conv2d(inputs, 4 * middle, 1, stride, bias=False) if project else None
        self.conv1, self.norm2 = nn.Conv2d(inputs, middle, 1, bias=False), nn.BatchNorm2d(middle, eps=1.001e-5)
        self.conv2 = nn.Conv2d(middle, middle, 3, stride, 1, bias=False)
        self.norm3, self.conv3 = nn.BatchNorm2d(middle, eps=1.001e-5), nn.Conv2d(middle, 4 * middle, 1, bias=False)

    def forward(self, x: Any) -> Any:
        y = F.relu(self.norm1(x))
        shortcut = F.max_pool2d(x, 1, self.stride) if self.stride > 1 else x
        shortcut = shortcut if self.downsample is None else self.downsample(y)
        return shortcut + self.conv3(F.relu(self.norm3(self.conv2(F.relu(self.norm2(self.conv1(y)))))))


class TimmResNetV2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.stages = nn.Sequential()
        width = 64
        for stage, count in enumerate((3, 4, 6, 3)):
            middle, each = 64 * 2**stage, nn.Sequential()
            for position in range(count):
                stride = 2 if position == count - 1 and stage < 3 else 1
                each.append(PreActBlock(width, middle, stride, position == 0))
                width = 4 * middle
            self.stages.append(each)
        self.norm, self.head = nn.BatchNorm2d(width, eps=1.001e-5), nn.Linear(width, 10)

    def forward(self, x: Any) -> Any:
        x = self.stages(F.max_pool2d(F.pad(self.stem(x), (1, 1, 1, 1)), 3, 2))
        return self.head(F.relu(self.norm(x)).mean((2, 3)))


# VGG: a flatten, from Keras to torch.
def keras_vgg() -> Any:
    return keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            layers.Conv2D(8, 3, padding="same", activation="relu", name="block1_conv1"),
            layers.MaxPooling2D(2, name="block1_pool"),
            layers.Conv2D(16, 3, padding="same", activation="relu", name="block2_conv1"),
            layers.Conv2D(16, 3, padding="same", activation="relu", name="block2_conv2"),
            layers.MaxPooling2D(2, name="block2_pool"),
            layers.Flatten(name="flatten"),
            layers.Dense(32, activation="relu", name="fc1"),
            layers.Dense(32, activation="relu", name="fc2"),
            layers.Dense(10, name="predictions"),
        ]
    )


class VGG(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Linear(256, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 10)
        )

    def forward(self, x: Any) -> Any:
        return self.classifier(torch.flatten(self.features(x), 1))


# BERT's encoder as KerasHub writes it.
class TransformerEncoder(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._self_attention_layer = layers.MultiHeadAttention(4, 8, name="self_attention_layer")
        self._self_attention_layer_norm = layers.LayerNormalization(epsilon=1e-12, name="self_attention_layer_norm")
        self._feedforward_layer_norm = layers.LayerNormalization(epsilon=1e-12, name="feedforward_layer_norm")
        self._feedforward_intermediate_dense = layers.Dense(48, "gelu", name="feedforward_intermediate_dense")
        self._feedforward_output_dense = layers.Dense(32, name="feedforward_output_dense")

    def build(self, shape: Any) -> None:
        self._self_attention_layer.build(shape, shape)
        for each in (self._self_attention_layer_norm, self._feedforward_layer_norm):
            each.build(shape)
        self._feedforward_intermediate_dense.build(shape)
        self._feedforward_output_dense.build((*shape[:-1], 48))
        self.built = True

    def call(self, x: Any) -> Any:
        x = self._self_attention_layer_norm(x + self._self_attention_layer(x, x))
        y = self._feedforward_output_dense(self._feedforward_intermediate_dense(x))
        return self._feedforward_layer_norm(x + y)


class PositionEmbedding(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    def build(self, shape: Any) -> None:
        self.position_embeddings = self.add_weight(name="embeddings", shape=(16, shape[-1]))

    def call(self, x: Any) -> Any:
        return ops.broadcast_to(self.position_embeddings[: x.shape[1]], ops.shape(x))


def keras_bert(batch: Batch) -> Any:
    ids = keras.Input((7,), dtype="int32", name="token_ids")
    segments = keras.Input((7,), dtype="int32", name="segment_ids")
    x = layers.Embedding(VOCABULARY, 32, name="token_embedding")(ids)
    positions = PositionEmbedding(name="position_embedding")(x)
    x = layers.Add(name="embeddings_add")([x, positions, layers.Embedding(2, 32, name="segment_embedding")(segments)])
    x = layers.LayerNormalization(epsilon=1e-12, name="embeddings_layer_norm")(x)
    for number in range(2):
        x = TransformerEncoder(name=f"transformer_layer_{number}")(x)
    return keras.Model([ids, segments], layers.Dense(32, "tanh", name="pooled_dense")(x[:, 0]))


class Bert(transformers.BertModel):
    def forward(self, ids: Any, segments: Any) -> Any:
        return super().forward(input_ids=ids, token_type_ids=segments).pooler_output


def bert() -> Any:
    return Bert(
        transformers.BertConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
            max_position_embeddings=16,
        )
    )  # fmt: skip


def ids_and_segments(rng: np.random.Generator) -> Batch:
    return tokens()(rng)[0], rng.integers(0, 2, (2, 7))


# Neural collaborative filtering: four tables, two ways of reading them.
class NCF(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_user_GMF, self.embed_item_GMF = nn.Embedding(11, 8), nn.Embedding(13, 8)
        self.embed_user_MLP, self.embed_item_MLP = nn.Embedding(11, 16), nn.Embedding(13, 16)
        self.MLP_layers = nn.Sequential(
            nn.Dropout(0.1), nn.Linear(32, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 8), nn.ReLU()
        )
        self.predict_layer = nn.Linear(16, 1)

    def forward(self, user: Any, item: Any) -> Any:
        product = self.embed_user_GMF(user) * self.embed_item_GMF(item)
        y = self.MLP_layers(torch.cat([self.embed_user_MLP(user), self.embed_item_MLP(item)], -1))
        return self.predict_layer(torch.cat([product, y], -1))


def keras_ncf(batch: Batch) -> Any:
    user, item = (keras.Input((), dtype="int32", name=name) for name in ("user_input", "item_input"))
    product = layers.Multiply()(
        [
            layers.Embedding(11, 8, name="mf_embedding_user")(user),
            layers.Embedding(13, 8, name="mf_embedding_item")(item),
        ]
    )
    y = layers.Concatenate()(
        [layers.Embedding(11, 16, name="mlp_embedding_user")(user),
         layers.Embedding(13, 16, name="mlp_embedding_item")(item)]
    )  # fmt: skip
    y = layers.Dense(8, "relu", name="layer2")(layers.Dense(16, "relu", name="layer1")(y))
    return keras.Model([user, item], layers.Dense(1, name="prediction")(layers.Concatenate()([product, y])))


def user_and_item(rng: np.random.Generator) -> Batch:
    return rng.integers(0, 11, 5), rng.integers(0, 13, 5)


def images_last(rng: np.random.Generator) -> Batch:
    return (rng.standard_normal((2, 16, 16, 3)).astype(np.float32),)


CASES: Final = [
    Case("MobileNetV2", "transformers → keras.applications", mobilenet_v2,
         lambda batch: keras.applications.MobileNetV2(alpha=0.35, **SAME), images()),
    Case("MobileNet", "transformers → keras.applications", mobilenet_v1,
         lambda batch: keras.applications.MobileNet(alpha=0.25, dropout=0.001, **SAME), images()),
    Case("ConvNeXt", "transformers → keras.applications", convnext, keras_convnext, images(),
         remark="the target has the epsilon of its last norm that the report writes."),
    Case("EfficientNet", "transformers → keras.applications", efficientnet, keras_efficientnet, images(),
         remark="Keras's layers that scale pixels are cut off: transformers does that in its image processor."),
    Case("DenseNet", "torchvision → keras.applications", DenseNet,
         lambda batch: keras.applications.DenseNet121(**SAME), images()),
    Case("ResNetV2", "timm → keras.applications", TimmResNetV2,
         lambda batch: keras.applications.ResNet50V2(**SAME), images(),
         own_parameters=r"conv1_conv/bias|_[03]_conv/bias",
         remark="timm's side has the stem of its `fixed` kinds; biases that it lacks are zeros in Keras's."),
    Case("VGG", "keras.applications → torchvision", keras_vgg, lambda batch: VGG(), images_last,
         to_target=lambda batch: tuple(channels_first(each) for each in batch)),
    Case("BERT", "transformers → KerasHub", bert, keras_bert, ids_and_segments, to_target=unchanged),
    Case("NCF", "torch → Keras", NCF, keras_ncf, user_and_item, to_target=unchanged),
]  # fmt: skip
